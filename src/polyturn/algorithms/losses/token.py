"""Policy losses with one ratio per token.

r = exp(logprob - old_logprob)      A = advantage      sg = without gradient

The inputs of every loss: `logprobs_T` [T] under the policy, with gradient; `old_logprobs_T` [T] under the policy in the
denominator of the ratio; `advantages_T` [T].
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
    # The max of losses is -min of objectives, the more pessimistic of the two: it clips only moves that would gain.
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
        clip_low: How far below 1 the ratio may go.
        clip_high: How far above 1.
        dual_clip: c > 1 bounds the loss of a negative advantage to -c A (Ye et al. 2020, equation 5); None leaves it open.
    """
    log_ratio_T = log_ratio(logprobs_T, old_logprobs_T)
    loss_T, is_clipped_T = clipped(log_ratio_T.exp(), advantages_T, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is not None:
        # PPO's minimum does not bound r above for A < 0: one token that became far likelier would outweigh the batch.
        bound_T = -advantages_T * dual_clip
        is_bounded_T = (advantages_T < 0) & (bound_T < loss_T)
        loss_T = torch.where(is_bounded_T, bound_T, loss_T)
        is_clipped_T = is_clipped_T | is_bounded_T
    return TokenLoss(loss_T, ratio_stats(log_ratio_T, is_clipped_T))


def policy_gradient(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor) -> TokenLoss:
    """Return -A logprob, the plain policy gradient, correct on policy only; `old_logprobs_T` only serves metrics.

    Source: Williams 1992 (REINFORCE); without any further term: Chu et al. 2025 (GPG), equation 4.
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
    """Return -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprob: only the weight is clipped, so every token keeps its
    gradient.

    Source: MiniMax 2025 (MiniMax-M1), equations 4 and 5; a clip_low of 1 means no lower bound, as there.

    Args:
        clip_low: How far below 1 the weight may go.
        clip_high: How far above 1.
    """
    log_ratio_T = log_ratio(logprobs_T, old_logprobs_T)
    ratio_T = log_ratio_T.detach().exp()
    weight_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)  # detached: the gradient is that of the log-probability
    return TokenLoss(-weight_T * advantages_T * logprobs_T, ratio_stats(log_ratio_T, weight_T != ratio_T))


def sapo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> TokenLoss:
    """Return -(4 / tau) sigmoid(tau (r - 1)) A: a gate that closes softly around r = 1 replaces the clip.

    Source: Gao et al. 2025 (Soft Adaptive Policy Optimization), equations 5 and 6; tau is tau_pos where A > 0 and tau_neg
    elsewhere. The gradient at r = 1 is that of r A.

    Args:
        tau_pos: Slope of the gate for tokens of positive advantage.
        tau_neg: Slope of the gate for the other tokens; larger than tau_pos for stability.

    Raises:
        ConfigError: a temperature is not positive.
    """
    if not (tau_pos > 0 and tau_neg > 0):
        raise ConfigError(f"sapo has tau_pos {tau_pos} and tau_neg {tau_neg}; both must be above 0")
    log_ratio_T = log_ratio(logprobs_T, old_logprobs_T)
    tau_T = torch.full_like(advantages_T, tau_neg).masked_fill(advantages_T > 0, tau_pos)
    # 4 / tau, because the slope of sigmoid(tau x) at 0 is tau / 4.
    gate_T = torch.sigmoid(tau_T * (log_ratio_T.exp() - 1.0)) * (4.0 / tau_T)
    return TokenLoss(-gate_T * advantages_T, ratio_stats(log_ratio_T))


def none(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor) -> TokenLoss:
    """Return 0: only the other terms (distillation, KL, entropy) train."""
    # 0 times the log-probabilities, so that backward works even if there is no other term.
    return TokenLoss(0.0 * logprobs_T, ratio_stats(log_ratio(logprobs_T, old_logprobs_T)))
