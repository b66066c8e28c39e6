"""The entry points for verl and ms-swift: adapters for their plug-ins, and their configurations.

The modules are imported on first use, so listing the entry points is cheap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyturn.compat import install
from polyturn.config.dialect import ConfigDialect
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.infra.plugin_shape import check_class, has_parameter
from polyturn.infra.stand_in import StandIn

_SHIMS = Path(__file__).parent / "shims"


def _inherits_from(cls: Any, module: str) -> bool:
    """Return whether a class inherits from a class of `module`, without importing the module."""
    return isinstance(cls, type) and any(base.__module__ == module for base in cls.__mro__)


def _agent_loop(target: Any, *, where: str) -> Callable[..., Any] | None:
    if not _inherits_from(target, "polyturn.compat.verl.agent_loop"):
        return None
    from polyturn.compat.verl.agent_loop import AGENT_LOOP
    from polyturn.compat.verl.agent_scheduler import AgentLoopScheduler

    check_class(target, AGENT_LOOP, where=where)

    def make() -> AgentLoopScheduler:
        return AgentLoopScheduler(target)

    return make


def _estimator(estimator: Any) -> Any:
    if not has_parameter(estimator, "token_level_rewards"):
        return None
    from polyturn.compat.verl.core_algos import as_estimator

    return as_estimator(estimator)


def _loss(loss: Any) -> Any:
    if not has_parameter(loss, "old_log_prob"):
        return None
    from polyturn.compat.verl.core_algos import as_policy_loss

    return as_policy_loss(loss)


def _eval_metrics(groups: Sequence[TrajectoryGroup]) -> Mapping[str, float]:
    from polyturn.compat.verl.validation import validation_metrics

    return validation_metrics(groups)


VERL = StandIn(
    name="verl",
    install=functools.partial(install, "verl"),
    shims=_SHIMS,
    programs={"torchrun": "polyturn.compat.verl.torchrun"},
    takes_overrides=True,
    adapt_scheduler=_agent_loop,
    adapt_estimator=_estimator,
    adapt_loss=_loss,
    eval_metrics=_eval_metrics,
)


def _swift_scheduler(target: Any, *, where: str) -> Callable[..., Any] | None:
    if not _inherits_from(target, "polyturn.compat.swift.base"):
        return None
    from polyturn.compat.swift.adapter import SwiftScheduler
    from polyturn.compat.swift.shapes import check_scheduler

    check_scheduler(target, where=where)
    return functools.partial(SwiftScheduler, target)


def _swift_schedulers() -> Mapping[str, Any]:
    from polyturn.compat.swift.schedulers import multi_turns

    return multi_turns


SWIFT = StandIn(
    name="swift",
    install=functools.partial(install, "swift"),
    shims=_SHIMS,
    programs={"swift": "polyturn.compat.swift", "megatron": "polyturn.compat.swift megatron"},
    adapt_scheduler=_swift_scheduler,
    schedulers=_swift_schedulers,
)


def _train_verl(path: Path, overrides: Sequence[str], *, resume: bool, dry_run: bool) -> None:
    from polyturn.compat.verl_config.command import run

    run(path, overrides, resume=resume, dry_run=dry_run)


def _migrate_verl(path: Path, overrides: Sequence[str], *, out: Path | None) -> None:
    from polyturn.compat.verl_config.migrate import run

    run(path, overrides, out=out)


def _train_swift(path: Path, overrides: Sequence[str], *, resume: bool, dry_run: bool) -> None:
    from polyturn.compat.swift.command import run

    run(path, overrides, resume=resume, dry_run=dry_run)


VERL_KEYS = ConfigDialect(
    title="verl",
    usual_keys=frozenset({"trainer", "critic", "reward_model", "data", "algorithm", "defaults", "hydra"}),
    own_keys=frozenset({"actor_rollout_ref", "custom_reward_function"}),
    train=_train_verl,
    migrate=_migrate_verl,
)

SWIFT_ARGUMENTS = ConfigDialect(
    title="ms-swift",
    usual_keys=frozenset(
        {
            "model", "dataset", "reward_funcs", "external_plugins", "vllm_mode", "num_generations", "train_type",
            "tuner_type", "max_completion_length", "vllm_server_host", "torch_dtype", "per_device_train_batch_size",
        }
    ),
    own_keys=frozenset({"rlhf_type", "multi_turn_scheduler"}),
    train=_train_swift,
)  # fmt: skip
