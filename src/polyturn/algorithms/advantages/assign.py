"""From the groups of a step and an estimator to samples with advantages.

    groups, samples -> views (failed trajectories left out) -> checks -> estimator -> samples with advantages (and returns)

The only place that knows how an estimator is called. What it cannot work on is refused here in a sentence.
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
from polyturn.core.errors import AlignmentError, ConfigError, TrainingError, did_you_mean, told_in_a_sentence
from polyturn.core.messages import Message
from polyturn.core.plugin_shape import has_parameter, takes_any_keyword
from polyturn.core.reward import brief
from polyturn.core.sample import SampleId, TrainSample
from polyturn.core.trajectory import Trajectory, TrajectoryGroup, Turn


def assign_advantages(
    groups: Sequence[TrajectoryGroup],
    samples: Sequence[TrainSample],
    *,
    estimator: Estimator,
    min_members: int = 1,
    has_scored: bool = False,
    state: dict[str, Any] | None = None,
) -> list[TrainSample]:
    """Return `samples`, in their order, with `advantages` set by `estimator`, and `returns` where it has a critic.

    Args:
        groups: The groups the samples come from. Failed trajectories are left out of the statistics.
        samples: Samples of these groups; those of failed trajectories must have been left out.
        estimator: One of the registry `advantages`, its options bound (`bind_estimator`).
        min_members: How many members a group needs to teach anything (`members_needed`); the trajectories of a smaller one,
            also of an agent that few of them have, get 0 and are in no statistics. At least what the estimator declares.
        has_scored: Whether earlier steps brought the scores or states of turns that it needs: then a step in which no member
            happened to earn one is not a mistake, and its turns are taken as not scored.
        state: What an estimator that declares `keeps_state` has kept so far, and changes; None begins anew.

    Raises:
        AlignmentError: a sample belongs to no trajectory here, or a trajectory has no finite reward.
        TrainingError: the estimator needs what no trajectory of the step brings, or returned something else than a finite
            number for each token.
    """
    traits = traits_of(estimator)
    batch, owned, alone = _views(groups, samples, least=max(min_members, traits.min_group))
    _check_batch(batch, estimator, has_scored=has_scored)
    batch_advantages = BatchAdvantages([])
    if batch:
        kept = {"state": {} if state is None else state} if traits.keeps_state else {}
        with told_in_a_sentence("the advantage estimator", TrainingError):
            if traits.scope == "group":
                estimates = [estimator(g.totals, [list(m.samples) for m in g.members], **kept) for g in batch]
            else:
                estimates = estimator(batch, **kept)
        batch_advantages = estimates if isinstance(estimates, BatchAdvantages) else BatchAdvantages(estimates)
    _check_estimate(batch_advantages, batch)
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
        raise TrainingError(f"the advantage estimator returned {bad}; return a finite number for each token")
    return out


def first_not_finite(samples: Sequence[TrainSample]) -> str | None:
    """Return words for the first advantage or weight that is NaN or infinite, which would spoil the step; None without."""
    for sample in samples:
        for name, array in (("advantages", sample.advantages), ("loss_weights", sample.loss_weights)):
            if array is not None and not (is_finite := np.isfinite(array)).all():
                token = int(np.argmin(is_finite))
                return f"{name} with {array[token]} at token {token} of {sample.id}"
    return None


class _Views(NamedTuple):
    """The views of a step that estimators are given."""

    batch: list[GroupView]
    owned: list[list[int]]
    """For each member the samples of it, by their places."""
    alone: list[int]
    """The samples of trajectories that are in no group."""


def _views(groups: Sequence[TrajectoryGroup], samples: Sequence[TrainSample], *, least: int) -> _Views:
    """Return the groups of a step with their samples, of each agent those that `least` members or more have.

    Raises:
        AlignmentError: a sample belongs to no trajectory here, or a trajectory has no finite reward.
    """
    places: dict[tuple[str, str], list[int]] = {}
    for index, sample in enumerate(samples):
        places.setdefault((sample.id.group, sample.id.trajectory), []).append(index)
    views = _Views([], [], [])
    for group in groups:
        kept = [t for t in group.trajectories if not t.is_failed]
        if not kept:
            continue
        for trajectory in kept:
            _check_reward(group, trajectory)
        # Taken out, so that the rest at the end belongs to no group. Some have no sample, and count in the statistics.
        indices = [places.pop((group.id, t.id), []) for t in kept]
        for of_agent in shares(kept, indices, samples):
            if len(of_agent) < least:  # a baseline of so few would be noise: advantage 0, and no part in batch statistics
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
    if places:
        lost: SampleId = samples[next(iter(places.values()))[0]].id
        raise AlignmentError(
            f"sample {lost} belongs to no live trajectory of these groups; filter samples and groups together"
        )
    return views


def bind_estimator(estimator: Estimator, *, offered: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Estimator:
    """Return `estimator` with its options.

    Args:
        estimator: The function.
        offered: What every estimator may use; it gets those that it has a parameter for.
        kwargs: Options of its own, which win.

    Raises:
        ConfigError: it takes no such option.
    """
    inputs = ("rewards_G", "samples_G", "batch", "state")  # what the trainer gives, and no option
    for name in kwargs:
        if not has_parameter(estimator, name) and not takes_any_keyword(estimator):
            options = [n for n in inspect.signature(estimator).parameters if n not in inputs]
            raise ConfigError(f"algorithm.advantage: the estimator takes no {name!r}.{did_you_mean(name, options)}")
    # What is offered must be asked for by name: an estimator with **kwargs would get options that are not its own.
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
    """Refuse an estimator that cannot work in a run, before anything is sampled.

    Raises:
        ConfigError: groups are too small for it and its options, or it has no use for rewards on single tokens.
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
            f"the estimator {name!r} normalises each reward apart, and a KL penalty on single tokens is none of them: set "
            "algorithm.kl.place to loss, or its coef to 0"
        )


def state_keys(turns: Sequence[Turn]) -> tuple[Hashable, ...]:
    """Return for each of one agent's turns a key of the state it was taken in, None where it is not known.

    It is the `state_key` that the turn before left in its info, else what that turn's observation says; the first turn is in
    the state of the task.
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
            f"the advantage estimator needs scores of turns and none of the {len(members)} trajectories of a step has one; "
            "let the interaction or the tools return scores, set turn.scores in a scheduler, or use an estimator of "
            "outcomes such as grpo"
        )
    later = [s for m in members for s in m.states_K[1:]]
    if traits.needs_states and not has_scored and later and all(s is None for s in later):
        raise TrainingError(
            "the advantage estimator compares turns that were taken in one state, and no turn of this step left an "
            "observation or a state_key in its info; set turn.info['state_key'], or use one of outcomes such as grpo"
        )
    missing = next((s.id for m in members for s in m.samples if s.values is None), None) if traits.needs_values else None
    if missing is not None:
        raise TrainingError(f"the advantage estimator needs a critic's values and sample {missing} has none; pass a critic")


def _check_estimate(batch_advantages: BatchAdvantages, batch: Sequence[GroupView]) -> None:
    """Refuse what is not, for each group, member and sample, as many numbers as the sample has tokens."""
    wanted = [[[len(s) for s in m.samples] for m in g.members] for g in batch]
    for name, value in (("advantages", batch_advantages.advantages), ("returns", batch_advantages.returns)):
        if value is None and name == "returns":
            continue
        try:
            lengths = [[[len(float_array(array)) for array in member] for member in group] for group in value or ()]
        except (TypeError, ValueError, RuntimeError):  # no lists, no numbers, a tensor with a gradient
            lengths = None
        if lengths != wanted:
            raise TrainingError(
                f"the advantage estimator returned the {name} {brief(value)}; return a list with an entry for each member "
                "of the group, which is a list with an array for each of its samples, as long as the sample has tokens"
            )
