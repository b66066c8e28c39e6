"""Filters of samples before the loss, each with its reason in the metrics (I3): nothing disappears uncounted.

failed trajectories       out of the loss and of their group's statistics
groups with one left      of several trajectories: a group baseline has nothing to compare it with
zero-variance groups      every advantage would be 0: no gradient, and tokens that would only dilute a token mean
truncated trajectories    optional: out of the loss, still in the statistics (Yu et al. 2025, DAPO, section 3.4)
samples without weight    nothing to train
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import NamedTuple

from polyturn.core.metrics import Metrics, Sum
from polyturn.core.sample import TrainSample
from polyturn.core.trajectory import Trajectory, TrajectoryGroup


class FilteredGroups(NamedTuple):
    """The groups that are kept, and what was left out."""

    groups: list[TrajectoryGroup]
    metrics: Metrics


class FilteredSamples(NamedTuple):
    """The samples that are kept, and what was left out."""

    samples: list[TrainSample]
    metrics: Metrics


def has_signal(
    group: TrajectoryGroup, *, min_members: int = 1, by_turns: bool = False, components: Collection[str] = ()
) -> bool:
    """Return whether the rewards of the trajectories that did not fail differ, so that there is something to learn from.

    Args:
        group: Finished trajectories of one task; one in which all failed has nothing.
        min_members: How many that did not fail are needed; where one is enough, a single one is taken as it is.
        by_turns: Whether the scores of turns count too, for an estimator that reads them.
        components: Parts of the reward that count by themselves, for an estimator that takes it apart.
    """
    live = [t for t in group.trajectories if not t.is_failed]
    seen = {(_rewards(t), tuple(t.turn_scores) if by_turns else (), _parts(t, components)) for t in live}
    return len(live) >= min_members and (len(live) == 1 or len(seen) > 1)


def filter_groups(groups: Sequence[TrajectoryGroup], *, min_members: int = 1, zero_variance: bool = True) -> FilteredGroups:
    """Drop failed trajectories, groups that have too few left, and groups whose rewards are all equal.

    Args:
        groups: What the rollout returned.
        min_members: How many trajectories must be left of a group.
        zero_variance: Drop groups of several trajectories with one and the same reward. Turn it off for an estimator that
            uses more than the trajectory's scalar reward, and for groups of one.
    """
    kept: list[TrajectoryGroup] = []
    failed: list[Trajectory] = []
    alone: list[tuple[Trajectory, ...]] = []
    flat: list[tuple[Trajectory, ...]] = []
    # The first reason that applies is the one that is counted, so that the counts add up to what was dropped.
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
    """Drop samples that have no weighted token and, if asked, those of truncated trajectories.

    Call it after the advantages are assigned: a truncated trajectory still counts in its group's statistics.
    """
    # By group and trajectory: a trajectory that was cut into several samples leaves with all of them.
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
    """Return all that is compared: in a game between two agents, totals may be equal and the agents' rewards not."""
    reward = trajectory.reward
    return None if reward is None else (reward.total, tuple(sorted(reward.agents.items())))


def _parts(trajectory: Trajectory, names: Collection[str]) -> tuple[float, ...]:
    numbers = {} if trajectory.reward is None or not names else trajectory.reward.numbers
    return tuple(numbers.get(name, 0.0) for name in sorted(names))


def _num_sampled(trajectories: Sequence[Trajectory]) -> int:
    return sum(t.num_sampled_tokens for t in trajectories)
