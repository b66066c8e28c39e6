"""The coefficient of each token's loss, over the whole batch of one optimizer step.

    loss of a micro-batch = sum over its tokens of coef_t * loss_t

The coefficients are computed once, before the batch is cut into micro-batches. So the sum of the micro-batches' gradients is
the same for every cut (I7).

A sequence in the names below is a whole *trajectory*: a trajectory of two segments counts once, and the result does not
depend on where it was cut. `segment_weight` sets the total weight W of a trajectory's tokens. With per_token, W is the sum
of the tokens' loss weights. With per_trajectory, the loss weights of each trajectory are first scaled so that all
trajectories have the mean W of the batch.

    w_t = loss weight, W = sum of w over a trajectory's samples, N = number of trajectories with W > 0
    token-mean                w_t / sum of all w            every token counts the same
    seq-mean-token-sum        w_t / N                       long trajectories count more
    seq-mean-token-mean       w_t / (W N)                   every trajectory counts the same (GRPO, Shao et al. 2024, eq. 3)
    seq-mean-token-sum-norm   w_t / (N norm_length)         a constant instead of the length (Dr. GRPO, Liu et al. 2025)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polyturn.core.errors import ConfigError, UnknownNameError, did_you_mean
from polyturn.core.sample import TrainSample

SEGMENT_WEIGHTS = ("per_token", "per_trajectory")
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def check_average(mode: str, segment_weight: str) -> None:
    """Raise for an unknown average.

    Raises:
        UnknownNameError: there is no such mode or segment weight.
    """
    for what, name, known in (("aggregation mode", mode, MODES), ("segment weight", segment_weight, SEGMENT_WEIGHTS)):
        if name not in known:
            raise UnknownNameError(f"there is no {what} {name!r}.{did_you_mean(name, known)}")


def loss_coefs(
    samples: Sequence[TrainSample],
    *,
    mode: str = "token-mean",
    norm_length: float | None = None,
    segment_weight: str = "per_token",
) -> list[NDArray[np.float64]]:
    """Return for each sample [T] the coefficient of each token's loss.

    Args:
        samples: All samples of one optimizer step, the global batch.
        mode: One of `MODES`.
        norm_length: The constant of seq-mean-token-sum-norm, for instance the largest number of tokens that a trajectory may
            sample; None takes the largest W of the batch.
        segment_weight: One of `SEGMENT_WEIGHTS`.

    Raises:
        UnknownNameError: no such mode or segment weight.
        ConfigError: `norm_length` is not positive.
    """
    check_average(mode, segment_weight)
    if norm_length is not None and not norm_length > 0:
        raise ConfigError(f"norm_length is {norm_length}; it must be positive, or None for the longest of the batch")
    # Sum in float64 and by trajectory, so that the number of its segments does not matter.
    weights = [s.loss_weights.astype(np.float64) for s in samples]
    totals: dict[tuple[str, str], float] = {}
    for sample, w in zip(samples, weights, strict=True):
        key = (sample.id.group, sample.id.trajectory)
        totals[key] = totals.get(key, 0.0) + float(w.sum())
    live = [total for total in totals.values() if total > 0]
    if not live:
        return weights  # all are 0
    if segment_weight == "per_trajectory":
        mean = sum(live) / len(live)
        weights = [
            w * (mean / total) if (total := totals[s.id.group, s.id.trajectory]) > 0 else w
            for s, w in zip(samples, weights, strict=True)
        ]
        totals = {key: mean if total > 0 else total for key, total in totals.items()}
        live = [mean] * len(live)
    if mode == "token-mean":
        return [w / sum(live) for w in weights]
    if mode == "seq-mean-token-mean":
        return [
            w / (total * len(live)) if (total := totals[s.id.group, s.id.trajectory]) > 0 else w
            for s, w in zip(samples, weights, strict=True)
        ]
    scale = 1.0 if mode == "seq-mean-token-sum" else (norm_length or max(live))
    return [w / (len(live) * scale) for w in weights]
