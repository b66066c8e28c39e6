"""Find keys that have no effect because another key's value turns off the part that reads them.

    algorithm: {aggregate: {norm_length: 512}}
      ->  Idle(path=("algorithm", "aggregate", "norm_length"), by=("algorithm", "aggregate", "name"), now="token-mean", …)

Such a key causes a warning and not an error, because configurations are often changed one key at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from polyturn.algorithms.options import WEIGHTS, AverageOptions, CorrectionSettings, KlOptions
from polyturn.config.models import AlgorithmConfig, AnyModelConfig, ClusterConfig, EvalConfig, RolloutConfig, RunConfig
from polyturn.config.parts import OwnPart
from polyturn.config.schema import KeyPath, is_model, keys_of
from polyturn.core.generation import Sampling
from polyturn.rewards.options import CallRate, SandboxOptions
from polyturn.rewards.overlong import Overlong
from polyturn.tools.breaker import BreakerSettings
from polyturn.training.options import ScheduleOptions, TrainOptions

SOME: tuple[Any, ...] = ()
"""Stands for every value except null, 0 and false."""
UNSET = (None,)

READ_WITH: Mapping[type, Mapping[str, tuple[str, Sequence[Any]]]] = {
    AverageOptions: {"norm_length": ("name", ("seq-mean-token-sum-norm",))},
    BreakerSettings: dict.fromkeys(("cooldown_s", "max_cooldown_s"), ("failures", SOME)),
    CallRate: {"tokens_per_call": ("tokens_per_minute", SOME)},
    ClusterConfig: dict.fromkeys(("rank_resources", "engines", "workers.resources", "patience_s"), ("address", SOME)),
    CorrectionSettings: dict.fromkeys(("cap", "beyond", "normalize"), ("weight", WEIGHTS[1:])),
    AlgorithmConfig: {
        "critic": ("advantage.name", ("gae", "turn_gae", "bilevel_gae")),
        "entropy_step": ("entropy_target", SOME),
    },
    EvalConfig: dict.fromkeys(("limit_during", "stop_at", "patience"), ("every", SOME)),
    KlOptions: {"place": ("coef", SOME), "estimator": ("coef", SOME), "horizon": ("target", SOME)},
    AnyModelConfig: {"revision": ("path", SOME)},
    Overlong: dict.fromkeys(("penalty", "max_tokens"), ("buffer", SOME)),
    RolloutConfig: {
        "interaction_timeout_s": ("interactions", SOME),
        "sanity_every": ("tokenization_sanity_check_mode", ("strict", "ignore_strippable")),
    },
    RunConfig: {
        "evaluation.before_warm_start": ("warm_start.steps", SOME),
        "compat.require_interaction_name": ("rollout.interactions", SOME),
        "rollout.scheduler_kwargs": ("env", UNSET),
    },
    Sampling: dict.fromkeys(("top_p", "top_k"), ("temperature", SOME)),
    SandboxOptions: {"token_env": ("url", SOME), "python": ("url", UNSET)},
    ScheduleOptions: {"min_lr_ratio": ("name", ("linear", "cosine"))},
    TrainOptions: {"steps": ("epochs", UNSET)},
}
"""Section -> key -> (other key, its values with which the first key is read). Keys are dotted and relative to the
section."""


class Idle(NamedTuple):
    """A key that is set and not read."""

    path: KeyPath
    by: KeyPath
    """The key that turns it off."""
    now: Any
    """The current value of `by`."""
    values: Sequence[Any]
    """Values of `by` with which the key is read."""


def idle_keys(section: Any, path: KeyPath = ()) -> Iterator[Idle]:
    """Yield the keys of a section and its subsections that differ from their defaults and are not read."""
    kind: Any = type(section)
    if is_model(kind):
        inside: list[tuple[str | int, Any]] = [(name, getattr(section, name)) for name in keys_of(kind)]
    elif isinstance(section, Mapping | list | tuple):
        inside = list(section.items() if isinstance(section, Mapping) else enumerate(section))
    else:
        return
    for key, (other, values) in _rules(kind).items():
        of, now = _at(section, key.rpartition(".")[0]), _at(section, other)
        # Only keys that differ from the default, because a run's saved configuration contains every key.
        value, default = _at(section, key), keys_of(cast(Any, type(of)))[key.rpartition(".")[2]].default
        is_own = isinstance(_at(section, other.rpartition(".")[0]), OwnPart)  # a user's part may read any key
        if value != default and not is_own and not (now in values if values else now):
            yield Idle((*path, *key.split(".")), (*path, *other.split(".")), now, values)
    for name, value in inside:
        yield from idle_keys(value, (*path, name))


def _rules(section: type) -> Mapping[str, tuple[str, Sequence[Any]]]:
    return next((READ_WITH[one] for one in section.__mro__ if one in READ_WITH), {})


def _at(section: Any, key: str) -> Any:
    for step in filter(None, key.split(".")):
        section = getattr(section, step)
    return section
