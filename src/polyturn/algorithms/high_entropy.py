"""Restrict the policy loss to the tokens of highest entropy.

    threshold = the lowest entropy in the `share` of an optimizer step's trained tokens that have the highest entropy
    factor_t  = 1 if entropy_t >= threshold, else 0; it multiplies the policy loss of token t

The mean of the loss still counts the other tokens, so a selected token has the same weight as without the selection. Source:
Wang et al. 2025 (Beyond the 80/20 Rule, arXiv 2506.01939), equation 6, which takes the threshold over a micro-batch; TRL
calls the share `top_entropy_quantile`. Here the threshold is taken over all tokens of one optimizer step, so that the result
does not depend on micro-batches or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from polyturn.core.arrays import Floats
from polyturn.core.sample import TrainSample

TIE = 1e-5
"""Entropies this close to the threshold, in nats, count as equal to it. For example, the first tokens of the members of a
group are sampled from the same distribution. Their computed entropies differ only by rounding, which depends on the
micro-batch and must not decide which of them are trained."""


class Selected(NamedTuple):
    """The samples of a step, with the policy loss restricted to some of their tokens."""

    samples: list[TrainSample]
    threshold: float
    """The threshold above, in nats."""


def select_high_entropy(samples: Sequence[TrainSample], entropies: Sequence[Floats], share: float) -> Selected:
    """Set the factor of the policy loss to 0 at the trained tokens of low entropy.

    Args:
        samples: All samples of one optimizer step, of all ranks.
        entropies: For each sample [T] the entropy of the distribution that each trained token is drawn from, in nats.
        share: The share of trained tokens to select. At least one is selected, and all whose entropy equals the threshold.
    """
    trained = [s.loss_weights != 0 for s in samples]
    flat_N = np.concatenate([np.asarray(e)[t] for e, t in zip(entropies, trained, strict=True)] or [np.empty(0)])
    if not len(flat_N):
        return Selected(list(samples), 0.0)
    rank = len(flat_N) - max(1, math.ceil(share * len(flat_N)))
    threshold = float(np.partition(flat_N, rank)[rank])
    out = []
    for sample, entropy_T in zip(samples, entropies, strict=True):
        factor_T = np.ones(len(sample), np.float32) if sample.correction is None else sample.correction
        out.append(sample.replace(correction=np.where(entropy_T >= threshold - TIE, factor_T, 0)))
    return Selected(out, threshold)
