"""Turn a group into training samples: one per segment with sampled tokens.

    trajectory with segments [PROMPT SAMPLED OBS SAMPLED] and [PROMPT SAMPLED]  ->  two samples

A sample trains the tokens that were sampled into its segment. If a later segment replays these tokens, they are part of that
segment's prompt and have no weight there. So every sampled token is trained in exactly one sample (I4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from polyturn.batching.loss_scale import LossScale
from polyturn.core.arrays import Floats
from polyturn.core.metrics import Metrics, Sum
from polyturn.core.sample import SampleId, TrainSample
from polyturn.core.trajectory import Segment, SpanSource, Trajectory, TrajectoryGroup


def to_samples(
    group: TrajectoryGroup, *, temperature: float, loss_scale: LossScale | None = None, observed: bool = False
) -> list[TrainSample]:
    """Return the samples of every trajectory of `group` that did not fail, in order.

    Args:
        group: The trajectories of one task.
        temperature: The sampling temperature. With 0 (greedy decoding) the samples get temperature 1, because engines then
            report logprobs at temperature 1.
        loss_scale: Sets the weights of sampled tokens whose weight no scheduler set; None keeps all weights as recorded.
        observed: Mark the tokens of observations, for the observation loss.
    """
    return [
        TrainSample(
            id=SampleId(group.id, trajectory.id, index),
            token_ids=segment.token_ids,
            loss_weights=segment.loss_weights if loss_scale is None else loss_scale.weights(trajectory, segment),
            turn_ids=segment.turn_ids,
            rollout_logprobs=segment.logprobs if _has_logprobs(segment) else None,
            support=segment.support,
            versions=segment.versions,
            observed=segment.observed_mask.astype(np.float32) if observed else None,
            turn_scores=scores_of_turns(trajectory),
            reward=trajectory.reward.of(segment.agent) if trajectory.reward is not None else math.nan,
            temperature=temperature or 1.0,  # engines report greedy logprobs at 1
            media=segment.media,
            routed_experts=segment.routed_experts,
        )
        for trajectory in group.trajectories
        if not trajectory.is_failed
        for index, segment in enumerate(trajectory.segments)
        if any(s.source is SpanSource.SAMPLED and len(s) for s in segment.spans)
    ]


def scores_of_turns(trajectory: Trajectory) -> Floats | None:
    """Return [K] the score of each turn, NaN for a turn without one; None if no turn has a score."""
    scores = trajectory.turn_scores
    if all(s is None for s in scores):
        return None
    return np.array([np.nan if s is None else s for s in scores], np.float32)


def dropped_by_scale(groups: Sequence[TrajectoryGroup], samples: Sequence[TrainSample]) -> Metrics:
    """Count the tokens that had a weight in the rollout and whose weight the loss scale set to 0 (I3)."""
    live = [t for g in groups for t in g.trajectories if not t.is_failed]
    recorded = sum(int(np.count_nonzero(s.loss_weights)) for t in live for s in t.segments)
    return {"tokens/dropped_loss_scale": Sum(recorded - sum(s.num_weighted for s in samples))}


def _has_logprobs(segment: Segment) -> bool:
    return all(s.logprobs is not None for s in segment.spans if s.source is SpanSource.SAMPLED and len(s))
