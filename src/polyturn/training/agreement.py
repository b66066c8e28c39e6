"""Compare the trainer's and the engine's log-probabilities of the same sampled tokens.

    log r = trainer's - engine's        k3 = mean of (r - 1) - log r, an estimate of KL(engine || trainer), Schulman 2020

The trainer's numbers come from the training forward pass, so this needs no further pass. Each metric exists for all tokens,
by turn (0, 1, 2, 3 and later), and for the first tokens of turns: the position at which a disagreement starts shows its
cause (`tracking/alarms.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polyturn.core.arrays import Floats
from polyturn.core.metrics import Max, Mean, Metrics
from polyturn.core.sample import TrainSample

MAX_LOG_RATIO = 20.0
LATE = 3
"""Turns from this index on share one metric."""


def agreement(samples: Sequence[TrainSample], policy_logprobs: Sequence[Floats]) -> Metrics:
    """Return metrics policy/rollout_… of the difference between the trainer's and the engine's log-probabilities.

    Args:
        samples: Samples with rollout_logprobs.
        policy_logprobs: For each sample [T] the trainer's log-probability of each weighted token, under the weights that the
            step began with.
    """
    indices = [np.flatnonzero(s.loss_weights) for s in samples]
    pairs = list(zip(samples, indices, strict=True))
    if not any(len(p) for p in indices):
        return {}
    engine = np.concatenate([np.asarray(s.rollout_logprobs, np.float64)[p] for s, p in pairs])
    own = np.concatenate([np.asarray(lp, np.float64)[p] for lp, p in zip(policy_logprobs, indices, strict=True)])
    turns = np.concatenate([s.turn_ids[p] for s, p in pairs])
    is_first = np.concatenate([_starts_turn(s)[p] for s, p in pairs])
    # Clamped, because one token that is impossible for the trainer would make every mean infinite.
    log_ratio = np.clip(own - engine, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = np.expm1(log_ratio) - log_ratio
    apart = np.abs(log_ratio)
    metrics = _figures("", k3, apart)
    for turn in range(LATE + 1):
        here = turns >= LATE if turn == LATE else turns == turn
        if here.any():
            metrics |= _figures(f"_turn{turn}" + ("plus" if turn == LATE else ""), k3[here], apart[here])
    for name, here in (("first_token", is_first), ("later_tokens", ~is_first)):
        if here.any():
            metrics[f"policy/rollout_difference_{name}"] = Mean(float(apart[here].sum()), int(here.sum()))
    return metrics


def _figures(suffix: str, k3: NDArray[np.float64], apart: NDArray[np.float64]) -> Metrics:
    count = len(apart)
    return {
        f"policy/rollout_k3{suffix}": Mean(float(k3.sum()), count),
        f"policy/rollout_difference{suffix}": Mean(float(apart.sum()), count),
        # If a step has several updates, the metric is the mean of their percentiles.
        f"policy/rollout_difference_p99{suffix}": Mean(float(np.percentile(apart, 99)) * count, count),
        f"policy/rollout_difference_max{suffix}": Max(float(apart.max())),
    }


def _starts_turn(sample: TrainSample) -> NDArray[np.bool_]:
    """Return [T] whether each token was sampled and the previous one was not."""
    is_sampled = sample.versions >= 0 if sample.versions is not None else sample.loss_weights != 0
    return is_sampled & ~np.concatenate([[False], is_sampled[:-1]])
