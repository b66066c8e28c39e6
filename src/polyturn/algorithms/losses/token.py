"""Policy losses with one ratio per token.

r = exp(logprob - old_logprob)      A = advantage      sg(x) = x without gradient

The inputs of every loss: `logprobs_T` [T], the tokens' log-probabilities under the trained policy, with gradient;
`old_logprobs_T` [T], the same under the old policy, for the denominator of the ratio; `advantages_T` [T].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polyturn.algorithms.losses.base import TokenLoss, log_ratio, ratio_stats
from polyturn.core.errors import ConfigError


class Clipped(NamedTuple):
    """A clipped loss, and the tokens at which the clip is active."""

    loss_T: Tensor
    is_clipped_T: Tensor


def clipped(ratio_T: Tensor, advantages_T: Tensor, *, clip_low: float, clip_high: float) -> Clipped:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and the tokens at which the clip is active."""
    # The larger loss is the smaller objective. So the clip is active only if a ratio beyond its bound would improve the
    # objective; a ratio beyond its bound that worsens the objective keeps its gradient.
    open_T = -advantages_T * ratio_T
    bounded_T = -advantages_T * ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    return Clipped(torch.maximum(open_T, bounded_T), bounded_T > open_T)


def ppo_clip(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprob - old_logprob).

    Source: Schulman et al. 2017 (PPO), equation 7; separate bounds: Yu et al. 2025 (DAPO), equation 8. DAPO's loss is this
    one with clip_high above clip_low and the aggregation token-mean.

    Args:
        clip_low: The ratio is clipped below 1 - clip_low.
        clip_high: The ratio is clipped above 1 + clip_high.
        dual_clip: c > 1: the loss of a token with a negative advantage is at most -c A (Ye et al. 2020, equation 5). None
            sets no limit.
    """
    log_ratio_T = log_ratio(logprobs_T, old_logprobs_T)
    loss_T, is_clipped_T = clipped(log_ratio_T.exp(), advantages_T, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is not None:
        # For A < 0 and r above 1 + clip_high, PPO's minimum is r A, which has no lower bound. Without this bound, a single
        # token whose probability rose a lot could dominate the loss of the batch.
        bound_T = -advantages_T * dual_clip
        is_bounded_T = (advantages_T < 0) & (bound_T < loss_T)
        loss_T = torch.where(is_bounded_T, bound_T, loss_T)
        is_clipped_T = is_clipped_T | is_bounded_T
    return TokenLoss(loss_T, ratio_stats(log_ratio_T, is_clipped_T))


def policy_gradient(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor) -> TokenLoss:
    """Return -A logprob, the plain policy gradient. It is correct on policy only; `old_logprobs_T` is used for metrics only.

    Source: Williams 1992 (REINFORCE). Chu et al. 2025 (GPG), equation 4, use it without any further term.
    """
    return TokenLoss(-advantages_T * logprobs_T, ratio_stats(log_ratio(logprobs_T, old_logprobs_T)))


def cispo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
) -> TokenLoss:
    """Return -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprob: the ratio is a clipped weight without gradient, so every
    token keeps the gradient of its log-probability.

    Source: MiniMax 2025 (MiniMax-M1), equations 4 and 5. As in the paper, the default clip_low of 1 sets no lower bound.

    Args:
        clip_low: The weight is clipped below 1 - clip_low.
        clip_high: The weight is clipped above 1 + clip_high.
    """
    log_ratio_T = log_ratio(logprobs_T, old_logprobs_T)
    ratio_T = log_ratio_T.detach().exp()
    weight_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)  # detached: only the log-probability has a gradient
    return TokenLoss(-weight_T * advantages_T * logprobs_T, ratio_stats(log_ratio_T, weight_T != ratio_T))


def sapo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> TokenLoss:
    """Return -(4 / tau) sigmoid(tau (r - 1)) A: a sigmoid replaces the clip, so the gradient fades smoothly as r moves away
    from 1.

    Source: Gao et al. 2025 (Soft Adaptive Policy Optimization), equations 5 and 6. tau is tau_pos for tokens with A > 0 and
    tau_neg for all others. At r = 1 the gradient equals that of the unclipped loss -r A.

    Args:
        tau_pos: tau of tokens with a positive advantage. The larger tau is, the faster the gradient fades.
        tau_neg: tau of the other tokens; the default is larger than tau_pos, which makes training more stable.

    Raises:
        ConfigError: `tau_pos` or `tau_neg` is not positive.
    """
    if not (tau_pos > 0 and tau_neg > 0):
        raise ConfigError(f"sapo has tau_pos {tau_pos} and tau_neg {tau_neg}; both must be above 0")
    log_ratio_T = log_ratio(logprobs_T, old_logprobs_T)
    tau_T = torch.full_like(advantages_T, tau_neg).masked_fill(advantages_T > 0, tau_pos)
    # 4 / tau, because the slope of sigmoid(tau x) at 0 is tau / 4.
    gate_T = torch.sigmoid(tau_T * (log_ratio_T.exp() - 1.0)) * (4.0 / tau_T)
    return TokenLoss(-gate_T * advantages_T, ratio_stats(log_ratio_T))


def none(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor) -> TokenLoss:
    """Return a loss of 0 for every token, so that only the other terms (distillation, KL, entropy) train the policy."""
    # Multiply the log-probabilities by 0 instead of making zeros, so that backward works even if there is no other term.
    return TokenLoss(0.0 * logprobs_T, ratio_stats(log_ratio(logprobs_T, old_logprobs_T)))
