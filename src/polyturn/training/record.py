"""What a step made of each trajectory, for the records: advantages, the trainer's log-probabilities, why one was left out.

A person who looks at a token wants to know why it was trained or not; the samples know it, and are gone after the step.
Arrays are over the sampled tokens of a trajectory, in the order of its segments, as the store keeps them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from polyturn.core.arrays import Floats
from polyturn.core.sample import TrainSample
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.store.schema import Trained


def trained_of(
    groups: Sequence[TrajectoryGroup],
    kept: Sequence[TrajectoryGroup],
    samples: Sequence[TrainSample],
    logprobs: Sequence[Floats] | None,
    *,
    rejected: Collection[str] = (),
    drops_truncated: bool = False,
) -> dict[str, Trained]:
    """Return, by the id of a trajectory, what the step made of it.

    Args:
        groups: The groups of the step.
        kept: Those of them, and of their trajectories, that passed the filters.
        samples: What was trained on, with advantages.
        logprobs: For each of `samples` [T] the trainer's log-probabilities; None if they were not kept.
        rejected: The ids of those that the off-policy correction left no token of.
        drops_truncated: Whether truncated ones were left out.
    """
    places: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        places.setdefault(sample.id.trajectory, []).append(index)
    live = {t.id for group in kept for t in group.trajectories}
    found = {}
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.is_failed:
                found[trajectory.id] = Trained(dropped="failed")
            elif trajectory.id not in live:
                is_alone = sum(not t.is_failed for t in group.trajectories) == 1 < len(group.trajectories)
                found[trajectory.id] = Trained(dropped="one_left" if is_alone else "zero_variance")
            elif trajectory.id in places:
                mine = {samples[i].id.segment: i for i in places[trajectory.id]}
                found[trajectory.id] = _trained(trajectory, mine, samples, logprobs)
            else:
                is_cut = drops_truncated and trajectory.stop_reason.is_truncation
                found[trajectory.id] = Trained(
                    dropped=_why_no_sample(trajectory, is_cut=is_cut, is_rejected=trajectory.id in rejected)
                )
    return found


def _trained(
    trajectory: Trajectory, mine: dict[int, int], samples: Sequence[TrainSample], logprobs: Sequence[Floats] | None
) -> Trained:
    advantages, own, weights, recorded = [], [], [], []
    for number, segment in enumerate(trajectory.segments):
        mask = segment.sampled_mask
        index = mine.get(number)
        blank = np.zeros(int(mask.sum()), np.float32)
        sample = None if index is None else samples[index]
        advantages.append(blank if sample is None or sample.advantages is None else sample.advantages[mask])
        own.append(blank if index is None or logprobs is None else logprobs[index][mask])
        weights.append(blank if sample is None else sample.loss_weights[mask])
        recorded.append(segment.loss_weights[mask])
    used = np.concatenate(weights)
    return Trained(
        advantages=np.concatenate(advantages),
        policy_logprobs=None if logprobs is None else np.concatenate(own),
        weights=None if np.array_equal(used, np.concatenate(recorded)) else used,
    )


def _why_no_sample(trajectory: Trajectory, *, is_cut: bool, is_rejected: bool) -> str:
    if not any(np.any(segment.loss_weights) for segment in trajectory.segments):
        return "none of its tokens has a weight"
    if is_rejected:
        return "rejected"
    return "truncated" if is_cut else "algorithm.loss_scale left out all of its tokens"
