"""Filters that drop groups and samples before the loss. The metrics count every drop by its reason (I3).

dropped                   why
failed trajectories       their episode or reward failed; they are left out of the loss and of their group's statistics
groups with one left      so many members failed that a group baseline has too few to compare (fewer than `min_members`)
zero-variance groups      all advantages are 0: they give no gradient, and their tokens would only lower a mean over tokens
truncated trajectories    optional: left out of the loss, but kept in the statistics (Yu et al. 2025, DAPO, section 3.4)
samples without weight    they have no token to train
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import NamedTuple

from polyturn.core.metrics import Metrics, Sum
from polyturn.core.sample import TrainSample
from polyturn.core.trajectory import Trajectory, TrajectoryGroup


class FilteredGroups(NamedTuple):
    """The groups that are kept, and the counts of the dropped ones."""

    groups: list[TrajectoryGroup]
    metrics: Metrics


class FilteredSamples(NamedTuple):
    """The samples that are kept, and the counts of the dropped ones."""

    samples: list[TrainSample]
    metrics: Metrics


def has_signal(
    group: TrajectoryGroup, *, min_members: int = 1, by_turns: bool = False, components: Collection[str] = ()
) -> bool:
    """Return whether the rewards of the live trajectories (those that did not fail) differ, so that the group can teach.

    Args:
        group: Finished trajectories of one task. A group without a live trajectory has no signal.
        min_members: A group with fewer live trajectories has no signal. With 1, a single live trajectory counts as a signal.
        by_turns: Whether to compare the scores of turns too, for an estimator that reads them.
        components: Reward components to compare too, for an estimator that weighs each of them.
    """
    live = [t for t in group.trajectories if not t.is_failed]
    seen = {(_rewards(t), tuple(t.turn_scores) if by_turns else (), _parts(t, components)) for t in live}
    return len(live) >= min_members and (len(live) == 1 or len(seen) > 1)


def filter_groups(groups: Sequence[TrajectoryGroup], *, min_members: int = 1, zero_variance: bool = True) -> FilteredGroups:
    """Drop failed trajectories, groups with too few live trajectories, and groups whose rewards are all equal.

    Args:
        groups: Finished groups from the rollout.
        min_members: Groups with fewer live trajectories are dropped.
        zero_variance: Whether to drop groups of several live trajectories whose rewards are all equal. Turn it off for an
            estimator that uses more than the scalar reward: it may give such a group advantages that are not 0.
    """
    kept: list[TrajectoryGroup] = []
    failed: list[Trajectory] = []
    alone: list[tuple[Trajectory, ...]] = []
    flat: list[tuple[Trajectory, ...]] = []
    # Count each dropped group under the first reason that applies, so that the counts add up to the number of drops.
    for group in groups:
        live = tuple(t for t in group.trajectories if not t.is_failed)
        failed += [t for t in group.trajectories if t.is_failed]
        if live and len(live) < min_members:
            alone.append(live)
        elif live and zero_variance and not has_signal(group):
            flat.append(live)
        elif live:
            kept.append(group if len(live) == len(group.trajectories) else dataclasses.replace(group, trajectories=live))
    metrics: Metrics = {
        "buffer/groups": Sum(len(groups)),
        "buffer/groups_kept": Sum(len(kept)),
        "buffer/groups_all_failed": Sum(len(groups) - len(kept) - len(alone) - len(flat)),
        "buffer/groups_one_left": Sum(len(alone)),
        "buffer/groups_zero_variance": Sum(len(flat)),
        "buffer/failed_trajectories": Sum(len(failed)),
        "tokens/dropped_failed": Sum(_num_sampled(failed)),
        "tokens/dropped_one_left": Sum(sum(map(_num_sampled, alone))),
        "tokens/dropped_zero_variance": Sum(sum(map(_num_sampled, flat))),
    }
    return FilteredGroups(kept, metrics)


def filter_samples(
    samples: Sequence[TrainSample], groups: Sequence[TrajectoryGroup], *, drop_truncated: bool = False
) -> FilteredSamples:
    """Drop samples without a weighted token and, with `drop_truncated`, the samples of truncated trajectories.

    Call it after the advantages are assigned: a truncated trajectory still counts in its group's statistics.
    """
    # A set of trajectories, not of samples: all samples of a truncated trajectory are dropped.
    truncated = {(g.id, t.id) for g in groups for t in g.trajectories if t.stop_reason.is_truncation}
    is_cut = [drop_truncated and (s.id.group, s.id.trajectory) in truncated for s in samples]
    kept = [s for s, cut in zip(samples, is_cut, strict=True) if not cut and s.num_weighted]
    metrics: Metrics = {
        "buffer/samples": Sum(len(samples)),
        "buffer/samples_kept": Sum(len(kept)),
        "buffer/samples_truncated": Sum(sum(is_cut)),
        "buffer/samples_unweighted": Sum(len(samples) - len(kept) - sum(is_cut)),
        "tokens/dropped_truncated": Sum(sum(s.num_weighted for s, cut in zip(samples, is_cut, strict=True) if cut)),
    }
    return FilteredSamples(kept, metrics)


def _rewards(trajectory: Trajectory) -> tuple[float, tuple[tuple[str, float], ...]] | None:
    """Return the total and the agents' rewards; trajectories with equal totals may differ in the agents' rewards."""
    reward = trajectory.reward
    return None if reward is None else (reward.total, tuple(sorted(reward.agents.items())))


def _parts(trajectory: Trajectory, names: Collection[str]) -> tuple[float, ...]:
    numbers = {} if trajectory.reward is None or not names else trajectory.reward.numbers
    return tuple(numbers.get(name, 0.0) for name in sorted(names))


def _num_sampled(trajectories: Sequence[Trajectory]) -> int:
    return sum(t.num_sampled_tokens for t in trajectories)
