"""Runs a project's own reward manager as a reward function: each finished trajectory becomes a batch of one row.

    reward_manager: collabllm, custom_reward_function.path: reward_function.py (which registers it)
      ->  reward.function {name: "polyturn.compat.verl.managed_reward:score", manager: collabllm, …}

    reward_manager.source: importlib, .module.path: managers.py, .name: Mine
      ->  reward.function {name: "polyturn.compat.verl.managed_reward:score", manager: "managers.py:Mine", …}

A manager gets the same columns as from verl's trainer: those of the row, the scores of the episode, and the agent loop's
`extra_fields`. Each trajectory is scored by itself as soon as it ends, so a manager cannot compare the rows of a batch.
Batch managers, and a project's sync functions for row managers, run in the main thread of a separate process, where timeouts
based on signals work. Row managers (`run_single`) run in an event loop of this process, and verl's own function in a thread
of it.
"""

from __future__ import annotations

import functools
import inspect
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import OmegaConf

from polyturn.compat.verl.dataproto import DataProto
from polyturn.compat.verl.padded_batch import to_dataproto
from polyturn.compat.verl.reward_loop import RewardManagerBase
from polyturn.compat.verl.reward_manager import get_reward_manager_cls
from polyturn.compat.verl.reward_score import default_compute_score
from polyturn.compat.verl.rollout_schemas import Message
from polyturn.compat.verl.tokenizer import hf_tokenizer
from polyturn.compat.verl_config.convert_reward import MANAGER_S, NUM_PROCESSES
from polyturn.core.errors import ConfigError
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.infra.aio import in_background
from polyturn.infra.plugin_shape import lacks
from polyturn.infra.plugins import import_attr
from polyturn.rewards.processes import Processes


def score(
    trajectory: Trajectory,
    *,
    manager: str,
    function: str | None = None,
    tokenizer: str,
    config: Mapping[str, Any] | None = None,
    manager_kwargs: Mapping[str, Any] | None = None,
    function_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Score a trajectory with a reward manager; return the score and the manager's further values.

    Args:
        trajectory: The trajectory.
        manager: The manager's registered name, or `file.py:Class`.
        function: The manager's reward function, `file.py:name`, whose import may register the manager; None is verl's own.
        tokenizer: The folder or name of the model.
        config: verl's config tree, for row managers.
        manager_kwargs: Arguments of the manager.
        function_kwargs: Fixed arguments of the function.
    """
    described = json.dumps([manager, function, tokenizer, config or {}, manager_kwargs or {}, function_kwargs or {}])
    with _MAKING:
        judge = _judge(described)
    result: dict[str, Any] = judge(trajectory=trajectory)
    return result


_MAKING = threading.Lock()
"""Held while a manager is created, so that concurrent first calls get the same one."""


@functools.cache
def _judge(described: str) -> Callable[..., dict[str, Any]]:
    """Return a function that scores a trajectory with the manager of `described`, the other arguments of `score` as JSON."""
    name, function, model, config, kwargs, function_kwargs = json.loads(described)
    cls, compute_score = _imported(name, function, function_kwargs)
    if not isinstance(cls, type) or not (issubclass(cls, RewardManagerBase) or _is_called(cls)):
        raise ConfigError(f"{name!r} is not a reward manager; inherit RewardManagerBase or AbstractRewardManager of verl")
    if not issubclass(cls, RewardManagerBase):
        return functools.partial(_in_processes(f"{__name__}:judge_batch"), described=described)
    if function is not None and not inspect.iscoroutinefunction(compute_score):
        compute_score = _by_name(compute_score, _in_processes(function))
    routers = {key: None for key in ("reward_router_address", "reward_model_tokenizer") if lacks(cls.__init__, key)}
    own = {"tokenizer": hf_tokenizer(model), "compute_score": compute_score, **routers, **kwargs}

    async def make() -> RewardManagerBase:
        return cls(config=OmegaConf.create(config), **own)

    manager = in_background(make(), thread="reward-managers")

    def judge(trajectory: Trajectory) -> dict[str, Any]:
        result = in_background(manager.run_single(as_batch(trajectory)), thread="reward-managers")
        return {**(result.get("reward_extra_info") or {}), "score": float(result["reward_score"])}

    return judge


def _is_called(cls: type) -> bool:
    """Return whether objects of a class can be called with a batch; before verl 0.6, managers had no base class."""
    return any("__call__" in vars(base) for base in cls.__mro__)


def judge_batch(trajectory: Trajectory, described: str) -> dict[str, Any]:
    """Score a trajectory with a batch manager, in a separate process."""
    result = _of_batches(described)(as_batch(trajectory), return_dict=True)
    reported = result.get("reward_extra_info") or {}
    info = {key: values[0] if len(values) else None for key, values in reported.items()}
    return {**info, "score": float(result["reward_tensor"].sum())}


@functools.cache
def _of_batches(described: str) -> Any:
    name, function, model, _, kwargs, function_kwargs = json.loads(described)
    cls, compute_score = _imported(name, function, function_kwargs)
    return cls(hf_tokenizer(model), 0, compute_score=compute_score, reward_fn_key="data_source", **kwargs)


def _imported(name: str, function: str | None, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the class of a manager and its reward function, whose import may register the manager."""
    compute_score: Any = default_compute_score if function is None else import_attr(function)
    bound = functools.partial(compute_score, **kwargs) if kwargs else compute_score
    return import_attr(name) if ":" in name else get_reward_manager_cls(name), bound


def _in_processes(function: str) -> Processes:
    return Processes(function, num=NUM_PROCESSES, timeout_s=MANAGER_S)


def _by_name(function: Any, processes: Processes) -> Callable[..., Any]:
    """Return a function that calls `function` in `processes` with keyword arguments; some may already be bound."""
    signature, bound = inspect.signature(function), getattr(function, "keywords", {})

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs)
        return processes(**{**bound, **dict(zip(signature.parameters, arguments.args, strict=False)), **arguments.kwargs})

    return call


def as_batch(trajectory: Trajectory) -> DataProto:
    """Return a trajectory as a batch of one row: its last trained segment."""
    task = trajectory.task
    group = TrajectoryGroup(id=task.id, task=task, trajectories=(trajectory,))
    batch = to_dataproto([group])
    trained = batch["response_mask"].any(dim=-1).nonzero().flatten().tolist()
    last = trained[-1] if trained else len(batch) - 1
    row = DataProto.from_tensordict(batch.exclude("rm_scores"))[last : last + 1]
    info = {key: value for turn in trajectory.turns for key, value in turn.info.items()}
    columns = {**task.extra, "ground_truth": task.ground_truth, **info}
    messages = (info if "messages" in info else row.non_tensor_batch["messages"][0])["messages"]
    columns["messages"] = {"messages": _as_messages(messages["messages"] if isinstance(messages, Mapping) else messages)}
    more = DataProto.from_dict(non_tensors={key: [value] for key, value in columns.items()})
    row.non_tensor_batch = {**more.non_tensor_batch, **{k: v for k, v in row.non_tensor_batch.items() if k != "messages"}}
    return row


def _as_messages(values: Any) -> Any:
    """Return a conversation, or a list of them, with messages as objects of verl's class."""
    if isinstance(values, Mapping):
        return Message.model_validate(values)
    return [_as_messages(value) for value in values]
