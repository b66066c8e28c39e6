"""Policy losses whose ratio is that of a whole sequence. A sequence is a segment: one sample, its trained tokens.

    s = exp(mean over the sequence of logprob - old_logprob), the geometric mean of the tokens' ratios

Micro-batches hold whole samples, so these see every token of a sequence at once, and means over sequences stay those of
`aggregate.py`. The papers average over sequences: aggregate with seq-mean-token-mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyturn.algorithms.losses.base import (
    MAX_LOG_RATIO,
    TokenLoss,
    log_ratio,
    ratio_stats,
    sequence_mean,
)
from polyturn.algorithms.losses.token import clipped


def gspo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    sequence_T: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> TokenLoss:
    """Return PPO's clipped loss with s in place of r, each token's own gradient: s_t = sg(s) probability / sg(probability).

    Source: Zheng et al. 2025 (GSPO), equations 13 and 14, the token form. Where all tokens of a sequence have one advantage
    its gradient is that of the sequence form (`gspo_sequence`); where turns have their own, each keeps its own.

    Args:
        sequence_T: [T] equal numbers for the tokens of one sequence.
        clip_low: How far below 1 the sequence's ratio may go. The paper's bounds are far narrower than a token's.
        clip_high: How far above 1.
    """
    log_T = log_ratio(logprobs_T, old_logprobs_T)
    own_T = logprobs_T - logprobs_T.detach()  # 0, with the gradient of the token
    log_s_T = sequence_mean(log_T.detach(), sequence_T)
    loss_T, is_clipped_T = clipped((log_s_T + own_T).exp(), advantages_T, clip_low=clip_low, clip_high=clip_high)
    return TokenLoss(loss_T, {**ratio_stats(log_T, is_clipped_T), "sequence_ratio": log_s_T.exp()})


def gspo_sequence(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    sequence_T: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> TokenLoss:
    """Return PPO's clipped loss with s in place of r, and its gradient through every token of the sequence.

    Source: Zheng et al. 2025 (GSPO), equations 5 and 7.

    Args:
        advantages_T: [T]; they reach all tokens of the sequence alike.
        sequence_T: [T] equal numbers for the tokens of one sequence.
        clip_low: How far below 1 the sequence's ratio may go.
        clip_high: How far above 1.
    """
    log_T = log_ratio(logprobs_T, old_logprobs_T)
    ratio_T = sequence_mean(log_T, sequence_T).exp()
    loss_T, is_clipped_T = clipped(ratio_T, advantages_T, clip_low=clip_low, clip_high=clip_high)
    return TokenLoss(loss_T, {**ratio_stats(log_T, is_clipped_T), "sequence_ratio": ratio_T.detach()})


def geo_mean(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    sequence_T: Tensor,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> TokenLoss:
    """Return -A exp(mean over the sequence of l), l the token's log ratio, clipped to [-clip_low, clip_high] on the side
    that its advantage pushes to.

    Source: Zhao et al. 2025 (Geometric-Mean Policy Optimization), equation 4. A is the mean advantage of the sequence.

    Args:
        sequence_T: [T] equal numbers for the tokens of one sequence.
        clip_low: Bound of the log ratio below 0.
        clip_high: Bound of the log ratio above 0.
    """
    log_T = log_ratio(logprobs_T, old_logprobs_T)
    bounded_T = log_T.clamp(-clip_low, clip_high)
    # Clipped where the advantage pushes and open where it pulls back, as in PPO's minimum.
    chosen_T = torch.where(advantages_T >= 0, torch.minimum(log_T, bounded_T), torch.maximum(log_T, bounded_T))
    mean_T = sequence_mean(chosen_T, sequence_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    loss_T = -sequence_mean(advantages_T, sequence_T) * mean_T.exp()
    return TokenLoss(loss_T, ratio_stats(log_T, chosen_T.detach() != log_T.detach()))
