"""Collect a step's results for each trajectory's record: advantages, the trainer's log-probabilities, reasons for drops.

The viewer shows why each token was trained or not, which only the samples of the step contain. Arrays are over the sampled
tokens of a trajectory, in the order of its segments, as in the store.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from polyturn.core.arrays import Floats
from polyturn.core.protocols import PassResult
from polyturn.core.sample import TrainSample
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.store.schema import Trained


def trained_of(
    groups: Sequence[TrajectoryGroup],
    kept: Sequence[TrajectoryGroup],
    samples: Sequence[TrainSample],
    passes: Sequence[PassResult],
    *,
    rejected: Collection[str] = (),
    drops_truncated: bool = False,
    min_members: int = 1,
) -> dict[str, Trained]:
    """Return trajectory id -> the step's results for that trajectory.

    Args:
        groups: The groups of the step.
        kept: The groups, with the trajectories, that passed the filters.
        samples: The trained samples, with advantages.
        passes: Results of the forward and backward passes over `samples`, in their order; empty while only the critic
            trains.
        rejected: Ids of trajectories all of whose tokens the off-policy correction rejected.
        drops_truncated: Whether truncated trajectories were left out.
        min_members: Number of live members that a group needed to pass the filters.
    """
    indices: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        indices.setdefault(sample.id.trajectory, []).append(index)
    live = {t.id for group in kept for t in group.trajectories}
    logprobs, entropies = _joined([p.logprobs for p in passes]), _joined([p.entropies for p in passes])
    advantages = [np.zeros(len(s), np.float32) if s.advantages is None else s.advantages for s in samples]
    weights = [s.loss_weights for s in samples]
    records = {}
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.is_failed:
                records[trajectory.id] = Trained(dropped="failed")
            elif trajectory.id not in live:
                # The filter only counts reasons, so derive the reason from the members.
                is_small = sum(not t.is_failed for t in group.trajectories) < min_members
                records[trajectory.id] = Trained(dropped="one_left" if is_small else "zero_variance")
            elif trajectory.id in indices:
                mine = {samples[i].id.segment: i for i in indices[trajectory.id]}
                used = _on_sampled(trajectory, mine, weights)
                recorded = np.concatenate([s.loss_weights[s.sampled_mask] for s in trajectory.segments])
                records[trajectory.id] = Trained(
                    advantages=_on_sampled(trajectory, mine, advantages),
                    policy_logprobs=None if logprobs is None else _on_sampled(trajectory, mine, logprobs),
                    entropies=None if entropies is None else _on_sampled(trajectory, mine, entropies),
                    # The spans have the same weights, unless a loss scale or a rejection changed them.
                    weights=None if np.array_equal(used, recorded) else used,
                )
            else:
                is_cut = drops_truncated and trajectory.stop_reason.is_truncation
                records[trajectory.id] = Trained(
                    dropped=_why_no_sample(trajectory, is_cut=is_cut, is_rejected=trajectory.id in rejected)
                )
    return records


def _joined(parts: Sequence[list[Floats] | None]) -> list[Floats] | None:
    """Return the arrays of all passes; None if a pass kept none."""
    known = [part for part in parts if part is not None]
    return [one for part in known for one in part] if parts and len(known) == len(parts) else None


def _on_sampled(trajectory: Trajectory, mine: dict[int, int], values: Sequence[Floats]) -> Floats:
    """Return the values at a trajectory's sampled tokens, 0 in segments without a sample."""
    masks = [segment.sampled_mask for segment in trajectory.segments]
    parts = [values[mine[n]][mask] if n in mine else np.zeros(int(mask.sum()), np.float32) for n, mask in enumerate(masks)]
    return np.concatenate(parts)


def _why_no_sample(trajectory: Trajectory, *, is_cut: bool, is_rejected: bool) -> str:
    if not any(np.any(segment.loss_weights) for segment in trajectory.segments):
        return "none of its tokens has a weight"
    if is_rejected:
        return "rejected"
    return "truncated" if is_cut else "algorithm.loss_scale left out all of its tokens"
