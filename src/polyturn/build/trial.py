"""Call a user's estimator and loss once on two made-up tasks, before anything is sampled.

    group made-up-0: members made-up-0/0, made-up-0/1, …   each [prompt prompt  sampled sampled  observation  sampled]
    with the rewards 0, 1, 0, …

`algorithm.py` checks signatures. This check runs the code, so that a missing field or a wrong shape is found
before the first rollout. Built-in estimators and losses are not called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from polyturn.build.algorithm import build_estimator, build_loss
from polyturn.config.config_source import ConfigSource
from polyturn.core.errors import ConfigError, TrainingError
from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.reward import Reward
from polyturn.core.sample import TrainSample
from polyturn.core.task import Task
from polyturn.core.trajectory import Segment, Span, SpanRef, SpanSource, Trajectory, TrajectoryGroup, Turn

if TYPE_CHECKING:
    from polyturn.training.loss_terms import LossSettings

logger = logging.getLogger(__name__)


def try_credit(source: ConfigSource) -> None:
    """Call the run's estimator and policy loss once, unless they are built in.

    Raises:
        ConfigError: one raised, or did not return a finite number for each token.
    """
    from polyturn.algorithms.advantages import advantages
    from polyturn.algorithms.losses import policy_losses

    algorithm = source.config.algorithm
    groups = [_group(number, size=source.config.train.group_size) for number in range(2)]
    name = algorithm.advantage.name
    if _is_own(advantages.resolve(name, base=source.base, key="algorithm.advantage")):
        _try("algorithm.advantage", name, lambda: _estimate(groups, build_estimator(source)))
    name = algorithm.loss.name
    if _is_own(policy_losses.resolve(name, base=source.base, key="algorithm.loss")):
        _try("algorithm.loss", name, lambda: _lose(groups, build_loss(source)))


def _is_own(function: Any) -> bool:
    return not getattr(function, "__module__", "").startswith("polyturn.")


def _try(key: str, name: Any, call: Callable[[], None]) -> None:
    try:
        call()
    except TrainingError as problem:
        if isinstance(problem.__cause__, KeyError):  # of a reward component or column that real episodes may have
            logger.warning("%s %r, called on two made-up tasks: %s; real tasks may have the key", key, name, problem)
            return
        raise ConfigError(f"{key} {name!r}, called on two made-up tasks: {problem}") from problem


def _estimate(groups: list[TrajectoryGroup], estimator: Any) -> None:
    from polyturn.algorithms.advantages import assign_advantages, traits_of

    samples = _samples(groups)
    if traits_of(estimator).needs_values:
        samples = [sample.replace(values=np.full(len(sample), 0.5, np.float32)) for sample in samples]
    assign_advantages(groups, samples, estimator=estimator)


def _lose(groups: list[TrajectoryGroup], settings: LossSettings) -> None:
    import torch

    from polyturn.algorithms.losses import bind, mark, selection_of
    from polyturn.core.errors import plugin_errors_as

    samples = [
        sample.replace(advantages=np.full(len(sample), sample.reward - 0.5), old_logprobs=sample.rollout_logprobs)
        for sample in _samples(groups)
    ]
    loss, kwargs = settings.policy_loss, settings.policy_loss_kwargs
    selection = selection_of(loss, kwargs=kwargs)
    marks = [np.zeros(len(sample)) for sample in samples] if selection is None else mark(samples, selection, seed=0)
    picked = [np.flatnonzero(sample.loss_weights) for sample in samples]

    def tokens(arrays: list[Any]) -> Any:
        return torch.tensor(
            np.concatenate([array[at] for array, at in zip(arrays, picked, strict=True)]), dtype=torch.float32
        )

    old_T = tokens([sample.old_logprobs for sample in samples])
    logprobs_T = (old_T + 0.1).requires_grad_()
    sequence_T = torch.tensor(np.repeat(np.arange(len(samples)), [len(at) for at in picked]))
    advantages_T = tokens([sample.advantages for sample in samples])
    loss_of_trial = bind(loss, kwargs=kwargs)(logprobs_T, old_T, advantages_T, sequence_T, tokens(marks))
    if not loss_of_trial.loss_T.requires_grad:
        raise TrainingError(
            "the policy loss has no gradient; compute it from logprobs_T, without detach() or conversion to numbers"
        )
    with plugin_errors_as("the gradient of the policy loss", TrainingError):
        loss_of_trial.loss_T.sum().backward()


def _samples(groups: list[TrajectoryGroup]) -> list[TrainSample]:
    from polyturn.batching.samples import to_samples

    return [sample for group in groups for sample in to_samples(group, temperature=1.0)]


def _group(number: int, *, size: int) -> TrajectoryGroup:
    """Return a group of conversations of two turns; every second conversation succeeded."""
    name = f"made-up-{number}"
    task = Task(id=name, data_source="made_up", prompt=(Message(role="user", content="Is it so?"),))
    members = tuple(_member(task, f"{name}/{index}", won=float(index % 2)) for index in range(size))
    return TrajectoryGroup(id=name, task=task, trajectories=members, baseline=_member(task, f"{name}/greedy", won=0.0))


def _member(task: Task, name: str, *, won: float) -> Trajectory:
    def sampled(ids: list[int], turn: int) -> Span:
        logprobs = np.full(len(ids), -1.0 - won, np.float32)
        return Span(ids=np.array(ids, np.int32), source=SpanSource.SAMPLED, turn=turn, logprobs=logprobs, policy_version=0)

    spans = (
        Span(ids=np.array([0, 1], np.int32), source=SpanSource.PROMPT),
        sampled([2, 3], 0),
        Span(ids=np.array([1], np.int32), source=SpanSource.OBSERVATION, turn=0),
        sampled([2], 1),
    )
    turns = tuple(
        Turn(
            index=index,
            message=Message(role="assistant", content="Yes."),
            finish_reason=FinishReason.STOP,
            spans=refs,
            observation=() if index else (Message(role="user", content="Sure?"),),
            scores={"interaction": won / 2},
        )
        for index, refs in enumerate(((SpanRef(0, 1), SpanRef(0, 2)), (SpanRef(0, 3),)))
    )
    return Trajectory(
        id=name,
        task=task,
        segments=(Segment(spans=spans),),
        turns=turns,
        stop_reason=StopReason.STOP,
        reward=Reward(total=won, components={"outcome": won}),
    )
