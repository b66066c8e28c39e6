"""Estimators of KL(policy || reference) from the log-probabilities of sampled tokens, and entropy from logits.

Source: Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html). With x sampled from the policy and
log r = ref_logprob - logprob:

    k1 = -log r              unbiased, high variance; its gradient is 0 on average, so it is a measure and no loss
    k2 = (log r)^2 / 2       biased, low variance; on policy its gradient is the gradient of the KL
    k3 = (r - 1) - log r     unbiased, low variance, never negative; the term of GRPO's loss (Shao et al. 2024, equation 4)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from polyturn.algorithms.losses import MAX_LOG_RATIO
from polyturn.core.registry import Registry

KlEstimator = Callable[[Tensor, Tensor], Tensor]
"""(logprobs_T, ref_logprobs_T) -> [T]."""

kl_estimators: Registry[KlEstimator] = Registry("kl")


@kl_estimators.register("k1")
def k1(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Return [T] logprob - ref_logprob."""
    return logprobs_T - ref_logprobs_T


@kl_estimators.register("k2")
def k2(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Return [T] half the squared difference."""
    return 0.5 * (logprobs_T - ref_logprobs_T).square()


@kl_estimators.register("k3")
def k3(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Return [T] (r - 1) - log r with r = ref probability / probability."""
    log_r_T = (ref_logprobs_T - logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_r_T) - log_r_T


def entropy(log_softmax_SV: Tensor) -> Tensor:
    """Return [S] the entropy in nats of each distribution, given the log-probabilities of the whole vocabulary."""
    return -(log_softmax_SV.exp() * log_softmax_SV).sum(-1)
