"""Policy losses that bound how far a token's probability moves, by a divergence or a square, instead of clipping its ratio.

    p = exp(logprob)      q = exp(old_logprob)      r = p / q      sg(x) = x without gradient

A ratio of 2 changes the policy little at a token of probability 1e-4, and much at a token of probability 0.4. PPO's clip
treats both tokens alike; these losses do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyturn.algorithms.losses.base import TokenLoss, log_ratio, ratio_stats
from polyturn.core.errors import ConfigError

TINY = 1e-8
"""Added to 1 - p and 1 - q, the probability of all other tokens, which may round to 0 if the token is almost certain."""


def dppo_tv(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    cap: float = 20.0,
) -> TokenLoss:
    """Return -sg(min(r, cap)) A logprob, but 0 at tokens that A would move further from q although they are out of bounds.

    These are tokens with A > 0 and p - q > clip_high, and tokens with A <= 0 and p - q < -clip_low. Source: Qi et al. 2026
    (Rethinking the Trust Region in LLM Reinforcement Learning, arXiv 2602.04879), DPPO-Binary-TV: |p - q| is the total
    variation of the two-outcome distributions "this token, or another".

    Args:
        clip_low: Bound of q - p, for tokens with A <= 0.
        clip_high: Bound of p - q, for tokens with A > 0.
        cap: Upper bound of the importance weight r.
    """
    log_T = log_ratio(logprobs_T, old_logprobs_T)
    moved_T = logprobs_T.detach().exp() - old_logprobs_T.detach().exp()
    is_out_T = torch.where(advantages_T > 0, moved_T > clip_high, moved_T < -clip_low)
    return _masked(logprobs_T, log_T, advantages_T, is_out_T, cap)


def dppo_kl(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    cap: float = 20.0,
) -> TokenLoss:
    """Return the loss of `dppo_tv` with KL((q, 1 - q) || (p, 1 - p)), in nats, as the distance.

    Source: Qi et al. 2026 (arXiv 2602.04879), DPPO-Binary-KL.

    Args:
        clip_low: Bound of the divergence for tokens with A <= 0 that became less likely.
        clip_high: Bound of the divergence for tokens with A > 0 that became more likely.
        cap: Upper bound of the importance weight r.
    """
    log_T = log_ratio(logprobs_T, old_logprobs_T)
    divergence_T = binary_kl(old_logprobs_T.detach(), logprobs_T.detach())
    is_up_T = advantages_T > 0
    is_beyond_T = divergence_T > torch.where(is_up_T, clip_high, clip_low)
    is_pushed_on_T = torch.where(is_up_T, log_T.detach() > 0, log_T.detach() < 0)
    return _masked(logprobs_T, log_T, advantages_T, is_beyond_T & is_pushed_on_T, cap)


def dro(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, *, dro_beta: float = 0.1) -> TokenLoss:
    """Return -(A logprob - dro_beta / 2 (logprob - old_logprob)^2): the square keeps the policy near the old one.

    Source: Richemond et al. 2024 (Offline Regularised Reinforcement Learning, DRO), with a square for each token instead of
    one for the sequence.

    Args:
        dro_beta: Weight of the square; above 0.

    Raises:
        ConfigError: dro_beta is not positive.
    """
    if not dro_beta > 0:
        raise ConfigError(f"dro has dro_beta {dro_beta}; it must be above 0")
    far_T = logprobs_T - old_logprobs_T.detach()
    return TokenLoss(
        0.5 * dro_beta * far_T.square() - advantages_T * logprobs_T, ratio_stats(log_ratio(logprobs_T, old_logprobs_T))
    )


def binary_kl(log_q_T: Tensor, log_p_T: Tensor) -> Tensor:
    """Return [T] KL(q || p) of the two-outcome distributions "this token, or another", in nats."""
    q_T, p_T = log_q_T.exp(), log_p_T.exp()
    return q_T * (log_q_T - log_p_T) + (1 - q_T) * torch.log(
        ((1 - q_T).clamp(min=0) + TINY) / ((1 - p_T).clamp(min=0) + TINY)
    )


def _masked(logprobs_T: Tensor, log_T: Tensor, advantages_T: Tensor, is_out_T: Tensor, cap: float) -> TokenLoss:
    weight_T = log_T.detach().exp().clamp(max=cap)
    loss_T = torch.where(is_out_T, 0.0 * logprobs_T, -weight_T * advantages_T * logprobs_T)
    return TokenLoss(loss_T, ratio_stats(log_T, is_out_T))
