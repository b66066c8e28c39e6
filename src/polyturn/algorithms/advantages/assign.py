"""Apply an advantage estimator to the groups of a step.

    groups, samples -> views (failed trajectories left out) -> checks -> estimator -> samples with advantages (and returns)

Only this module calls estimators. It checks that their inputs exist and that their results have the right shape.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from polyturn.algorithms.advantages.agents import Share, shares
from polyturn.algorithms.advantages.base import BatchAdvantages, Estimator, GroupView, MemberView, on_weighted, traits_of
from polyturn.core.arrays import float_array
from polyturn.core.code_origin import defined_at
from polyturn.core.errors import AlignmentError, ConfigError, TrainingError, did_you_mean, plugin_errors_as
from polyturn.core.messages import Message
from polyturn.core.reward import brief
from polyturn.core.sample import SampleId, TrainSample
from polyturn.core.trajectory import Trajectory, TrajectoryGroup, Turn
from polyturn.infra.plugin_shape import has_parameter, takes_any_keyword


def assign_advantages(
    groups: Sequence[TrajectoryGroup],
    samples: Sequence[TrainSample],
    *,
    estimator: Estimator,
    min_members: int = 1,
    has_scored: bool = False,
    needs_rewards: bool = True,
    state: dict[str, Any] | None = None,
) -> list[TrainSample]:
    """Return `samples`, in their order, with the estimator's `advantages`, and `returns` if it uses a critic.

    Args:
        groups: The groups of the samples. Failed trajectories are left out of the statistics.
        samples: Samples of the live trajectories.
        estimator: An estimator with bound options (`bind_estimator`).
        min_members: Smallest number of live members with which a group is used (`members_needed`); the estimator's
            `min_group`, if that is larger. The members of a smaller group get advantages of 0 and are left out of the
            statistics. An agent with a separate reward is a member only of the trajectories in which it appears.
        has_scored: Whether an earlier step had the turn scores or state keys that the estimator needs. If so, a step without
            any is accepted, and its turns count as not scored; if not, it is an error.
        needs_rewards: Whether every live trajectory must have a reward. If not, those without one get advantages of 0 and
            are left out of the statistics.
        state: The state of an estimator that declares `keeps_state`; the estimator updates it. None starts with an empty
            state.

    Raises:
        AlignmentError: a sample belongs to none of the live trajectories, or a live trajectory lacks a finite reward.
        TrainingError: no trajectory of the step has an input that the estimator needs, or the estimator did not return a
            finite number for each token.
    """
    traits = traits_of(estimator)
    least = max(min_members, traits.min_group)
    batch, owned, alone = _views(groups, samples, least=least, needs_rewards=needs_rewards)
    _check_batch(batch, estimator, has_scored=has_scored)
    batch_advantages = BatchAdvantages([])
    if batch:
        kept = {"state": {} if state is None else state} if traits.keeps_state else {}
        with plugin_errors_as("the advantage estimator", TrainingError):
            if traits.scope == "group":
                estimates = [estimator(g.totals, [list(m.samples) for m in g.members], **kept) for g in batch]
            else:
                estimates = estimator(batch, **kept)
        batch_advantages = estimates if isinstance(estimates, BatchAdvantages) else BatchAdvantages(estimates)
    _check_estimate(batch_advantages, batch, estimator)
    out = list(samples)
    for index in alone:
        out[index] = dataclasses.replace(samples[index], advantages=on_weighted(samples[index], 0.0))
    arrays = [member for group in batch_advantages.advantages for member in group]
    targets = (
        None if batch_advantages.returns is None else [member for group in batch_advantages.returns for member in group]
    )
    for number, own in enumerate(owned):
        for position, index in enumerate(own):
            returns = samples[index].returns if targets is None else targets[number][position]
            out[index] = dataclasses.replace(samples[index], advantages=arrays[number][position], returns=returns)
    if (bad := first_not_finite(out)) is not None:
        raise TrainingError(
            f"the advantage estimator returned {bad}; return a finite number for each token{defined_at(estimator)}"
        )
    return out


def first_not_finite(samples: Sequence[TrainSample]) -> str | None:
    """Describe the first advantage or weight that is NaN or infinite; None if all are finite."""
    for sample in samples:
        for name, array in (("advantages", sample.advantages), ("loss_weights", sample.loss_weights)):
            if array is not None and not (is_finite := np.isfinite(array)).all():
                token = int(np.argmin(is_finite))
                return f"{name} with {array[token]} at token {token} of {sample.id}"
    return None


class _Views(NamedTuple):
    """The groups of a step as estimators see them."""

    batch: list[GroupView]
    owned: list[list[int]]
    """For each member of `batch`, in order, the indices of its samples."""
    alone: list[int]
    """Indices of the samples of groups that are too small, and of trajectories that need no reward and have none; they get
    advantages of 0."""


def _views(groups: Sequence[TrajectoryGroup], samples: Sequence[TrainSample], *, least: int, needs_rewards: bool) -> _Views:
    """Return the groups of a step that have at least `least` live members.

    If agents have separate rewards, a group of trajectories becomes one group per agent.

    Raises:
        AlignmentError: a sample belongs to none of the live trajectories, or a live trajectory has no finite reward.
    """
    indices_of: dict[tuple[str, str], list[int]] = {}
    for index, sample in enumerate(samples):
        indices_of.setdefault((sample.id.group, sample.id.trajectory), []).append(index)
    views = _Views([], [], [])
    for group in groups:
        kept: list[Trajectory] = []
        for trajectory in (t for t in group.trajectories if not t.is_failed):
            if trajectory.reward is None and not needs_rewards:
                views.alone.extend(indices_of.pop((group.id, trajectory.id), []))
                continue
            _check_reward(group, trajectory)
            kept.append(trajectory)
        if not kept:
            continue
        # Pop the samples of each trajectory: samples left at the end belong to no live trajectory, which is an error.
        # A trajectory without a sample still counts in the statistics.
        indices = [indices_of.pop((group.id, t.id), []) for t in kept]
        for of_agent in shares(kept, indices, samples):
            if len(of_agent) < least:  # too few members for a baseline: advantage 0, left out of batch statistics
                views.alone.extend(i for share in of_agent for i in share.indices)
                continue
            views.owned.extend(share.indices for share in of_agent)
            members = tuple(_member(share, [share.numbered(samples[i]) for i in share.indices]) for share in of_agent)
            agent = of_agent[0].agent
            name = group.id if agent is None else f"{group.id}/{agent}"
            views.batch.append(
                GroupView(
                    id=name,
                    members=members,
                    data_source=group.task.data_source or "",
                    agent=agent,
                    group=group.id,
                    greedy_reward=_greedy_reward(group, agent),
                )
            )
    if indices_of:
        lost: SampleId = samples[next(iter(indices_of.values()))[0]].id
        raise AlignmentError(
            f"sample {lost} belongs to no live trajectory of these groups; filter samples and groups together"
        )
    return views


def bind_estimator(estimator: Estimator, *, offered: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Estimator:
    """Return `estimator` with its options bound.

    Args:
        estimator: The function.
        offered: Options for any estimator; an option is bound if `estimator` has a parameter for it.
        kwargs: Options of this estimator; they override `offered`.

    Raises:
        ConfigError: the estimator has no parameter for one of `kwargs`.
    """
    inputs = ("rewards_G", "samples_G", "batch", "state")  # parameters that the trainer passes, so they are not options
    for name in kwargs:
        if not has_parameter(estimator, name) and not takes_any_keyword(estimator):
            options = [n for n in inspect.signature(estimator).parameters if n not in inputs]
            raise ConfigError(f"algorithm.advantage: the estimator has no option {name!r}.{did_you_mean(name, options)}")
    # Only named parameters get offered options: an estimator with **kwargs would get options of other estimators.
    bound = {**{k: v for k, v in offered.items() if has_parameter(estimator, k)}, **kwargs}
    return functools.partial(estimator, **bound) if bound else estimator


def check_estimator(
    estimator: Estimator,
    *,
    name: str,
    group_size: int,
    kwargs: Mapping[str, Any] | None = None,
    has_penalties: bool = False,
) -> None:
    """Raise if an estimator cannot work in a run, before anything is sampled.

    Raises:
        ConfigError: groups are too small for the estimator or its options, or `has_penalties` and the estimator cannot use
            rewards on single tokens.
    """
    traits = traits_of(estimator)
    drawn = None if traits.draws is None else (kwargs or {}).get(traits.draws)
    if drawn is not None and not (isinstance(drawn, int) and 1 <= drawn < group_size):
        raise ConfigError(
            f"algorithm.advantage.{traits.draws} is {drawn!r} in groups of {group_size} (train.group_size); it must "
            f"be a number from 1 to {group_size - 1}"
        )
    if group_size < traits.min_group:
        raise ConfigError(
            f"train.group_size is {group_size} and the estimator {name!r} compares the trajectories of a group; "
            f"set it to {traits.min_group} or more, or algorithm.advantage to one without groups (reinforce_plus_plus, gae)"
        )
    if has_penalties and not traits.takes_penalties:
        raise ConfigError(
            f"the estimator {name!r} normalises each reward by itself and cannot use a KL penalty on single tokens; "
            "set algorithm.kl.place to loss, or its coef to 0"
        )


def state_keys(turns: Sequence[Turn]) -> tuple[Hashable, ...]:
    """Return for each turn of one agent a key of the state in which it was taken; None if unknown.

    The key of the first turn is the same for all trajectories of the task. The key of a later turn is the `state_key` in the
    previous turn's info; without one, the text of the previous turn's observation.
    """
    keys: list[Hashable] = ["task"]
    for turn in turns:
        own = turn.info.get("state_key")
        seen = tuple(_text(m) for m in turn.observation)
        keys.append(("key", str(own)) if own is not None else ("seen", *seen) if seen else None)
    return tuple(keys[: len(turns)])


def _text(message: Message) -> str:
    return f"{message.role}:{message.content}"


def _check_reward(group: TrajectoryGroup, trajectory: Trajectory) -> None:
    reward = trajectory.reward
    if reward is None or not math.isfinite(reward.total):
        raise AlignmentError(
            f"trajectory {trajectory.id!r} of group {group.id!r} has the reward {reward}; every trajectory that did not "
            "fail needs a finite one before advantages are computed"
        )


def _member(share: Share, samples: Sequence[TrainSample]) -> MemberView:
    reward = share.trajectory.reward
    assert reward is not None  # checked
    scores = [np.nan if t.score is None else t.score for t in share.turns]
    return MemberView(
        id=share.trajectory.id,
        reward=share.reward,
        samples=tuple(samples),
        components=reward.numbers,
        turn_scores_K=np.array(scores, dtype=np.float64),
        states_K=state_keys(share.turns),
    )


def _greedy_reward(group: TrajectoryGroup, agent: str | None) -> float | None:
    greedy = group.baseline
    if greedy is None or greedy.is_failed or greedy.reward is None or not math.isfinite(greedy.reward.total):
        return None
    return greedy.reward.total if agent is None else greedy.reward.of(agent)


def _check_batch(batch: Sequence[GroupView], estimator: Estimator, *, has_scored: bool) -> None:
    traits = traits_of(estimator)
    members = [m for g in batch for m in g.members]
    if not members:
        return
    if traits.needs_turn_scores and not has_scored and not any(np.isfinite(m.turn_scores_K).any() for m in members):
        raise TrainingError(
            f"the advantage estimator needs scores of turns, and none of the {len(members)} trajectories of this step has "
            "one; let the interaction or the tools return scores, set turn.scores in a scheduler, or use an estimator of "
            "outcomes such as grpo"
        )
    later = [s for m in members for s in m.states_K[1:]]
    if traits.needs_states and not has_scored and later and all(s is None for s in later):
        raise TrainingError(
            "the advantage estimator compares turns that were taken in the same state, and no turn of this step has "
            "an observation or a state_key in its info; set turn.info['state_key'], or use an estimator of outcomes "
            "such as grpo"
        )
    missing = next((s.id for m in members for s in m.samples if s.values is None), None) if traits.needs_values else None
    if missing is not None:
        raise TrainingError(f"the advantage estimator needs a critic's values, and sample {missing} has none; pass a critic")


def _check_estimate(batch_advantages: BatchAdvantages, batch: Sequence[GroupView], estimator: Estimator) -> None:
    """Raise a TrainingError unless the estimate has, for each group, member and sample, one number per token."""
    wanted = [[[len(s) for s in m.samples] for m in g.members] for g in batch]
    for name, value in (("advantages", batch_advantages.advantages), ("returns", batch_advantages.returns)):
        if value is None and name == "returns":
            continue
        try:
            lengths = [[[len(float_array(array)) for array in member] for member in group] for group in value or ()]
        except (TypeError, ValueError, RuntimeError):  # not lists, not numbers, or a tensor with a gradient
            lengths = None
        if lengths != wanted:
            raise TrainingError(
                f"the advantage estimator returned the {name} {brief(value)}; return a list with an entry per member "
                "of the group: a list of arrays, one per sample of the member, with a number per token"
                f"{defined_at(estimator)}"
            )
