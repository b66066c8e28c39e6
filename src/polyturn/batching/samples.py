"""From a group to training samples: one per segment in which the model wrote anything.

    trajectory with segments [PROMPT SAMPLED OBS SAMPLED] and [PROMPT SAMPLED]  ->  two samples

A segment owns the tokens that were sampled into it; a later segment that replays them holds them as its prompt. So every
sampled token is in exactly one sample (I4), and no array is computed here that the segment does not already have.
"""

from __future__ import annotations

from polyturn.core.sample import SampleId, TrainSample
from polyturn.core.trajectory import Segment, SpanSource, TrajectoryGroup


def to_samples(group: TrajectoryGroup, *, temperature: float) -> list[TrainSample]:
    """Return the samples of every trajectory of `group` that did not fail, in order.

    Args:
        group: The trajectories of one task.
        temperature: The one they were sampled at. Greedy decoding (0) reports logprobs at temperature 1, so 0 means 1.
    """
    return [
        TrainSample(
            id=SampleId(group.id, trajectory.id, index),
            token_ids=segment.token_ids,
            loss_weights=segment.loss_weights,
            turn_ids=segment.turn_ids,
            rollout_logprobs=segment.logprobs if _has_logprobs(segment) else None,
            versions=segment.versions,
            reward=trajectory.reward.total if trajectory.reward is not None else 0.0,
            temperature=temperature or 1.0,
            media=segment.media,
        )
        for trajectory in group.trajectories
        if not trajectory.is_failed
        for index, segment in enumerate(trajectory.segments)
        if any(s.source is SpanSource.SAMPLED and len(s) for s in segment.spans)
    ]


def _has_logprobs(segment: Segment) -> bool:
    return all(s.logprobs is not None for s in segment.spans if s.source is SpanSource.SAMPLED and len(s))
