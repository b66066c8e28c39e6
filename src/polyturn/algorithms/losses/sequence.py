"""Policy losses with one ratio for a whole sequence. A sequence is a segment: the trained tokens of one sample.

    s = exp(mean over the sequence of logprob - old_logprob), the geometric mean of the tokens' ratios

Micro-batches contain whole samples, so a loss sees all tokens of a sequence in one call. The papers take the mean over
sequences; set `aggregate` to seq-mean-token-mean to do the same.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polyturn.algorithms.losses.base import (
    MAX_LOG_RATIO,
    TokenLoss,
    log_ratio,
    ratio_stats,
    sequence_mean,
    sequence_sum,
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
    """Return PPO's clipped loss with s_t = sg(s) p / sg(p) in place of r, where p is the token's probability and sg(x) is x
    without gradient.

    The value of s_t is s, and its gradient depends on the token alone. Source: Zheng et al. 2025 (GSPO), equations 13 and
    14, the token form. If all tokens of a sequence have the same advantage, the sum over the sequence has the same gradient
    as the sequence form (`gspo_sequence`). If turns have different advantages, each acts only on the tokens of its turn.

    Args:
        sequence_T: [T] equal numbers for the tokens of one sequence.
        clip_low: s is clipped below 1 - clip_low. The paper's bounds are far narrower than the usual ones of token ratios.
        clip_high: s is clipped above 1 + clip_high.
    """
    log_T = log_ratio(logprobs_T, old_logprobs_T)
    own_T = logprobs_T - logprobs_T.detach()  # value 0, gradient of the token
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
    """Return PPO's clipped loss with s in place of r, with gradients through every token of the sequence.

    Source: Zheng et al. 2025 (GSPO), equations 5 and 7.

    Args:
        advantages_T: [T] the advantage of each token; through s, it acts on all tokens of its sequence.
        sequence_T: [T] equal numbers for the tokens of one sequence.
        clip_low: s is clipped below 1 - clip_low.
        clip_high: s is clipped above 1 + clip_high.
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
    """Return -A exp(mean over the sequence of l), with A the mean advantage of the sequence and l the token's log ratio.

    l is at most clip_high at tokens with an advantage of 0 or more, and at least -clip_low at the other tokens. Source: Zhao
    et al. 2025 (Geometric-Mean Policy Optimization), equation 4.

    Args:
        sequence_T: [T] equal numbers for the tokens of one sequence.
        clip_low: Tokens with a negative advantage: l is clipped below -clip_low.
        clip_high: The other tokens: l is clipped above clip_high.
    """
    log_T = log_ratio(logprobs_T, old_logprobs_T)
    bounded_T = log_T.clamp(-clip_low, clip_high)
    # Clip only in the direction in which the advantage moves the ratio, as PPO's minimum does.
    chosen_T = torch.where(advantages_T >= 0, torch.minimum(log_T, bounded_T), torch.maximum(log_T, bounded_T))
    mean_T = sequence_mean(chosen_T, sequence_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    loss_T = -sequence_mean(advantages_T, sequence_T) * mean_T.exp()
    return TokenLoss(loss_T, ratio_stats(log_T, chosen_T.detach() != log_T.detach()))


def vespo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    sequence_T: Tensor,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> TokenLoss:
    """Return -phi(w) A logprob, w = exp(sum of the sequence's log ratios), phi(w) = w^k exp(lambda (1 - w)) without
    gradient.

    The weight phi(w) replaces the clip. It is 1 on policy (w = 1) and approaches 0 for a sequence that has become much more
    or much less likely. Source: Shen et al. 2026 (VESPO, arXiv 2602.10693), with w between 1e-8 and e^20 as in its code.

    Args:
        sequence_T: [T] equal numbers for the tokens of one sequence.
        k_pos: The exponent k of tokens with A >= 0.
        lambda_pos: The decay lambda of tokens with A >= 0.
        k_neg: The exponent k of tokens with A < 0.
        lambda_neg: The decay lambda of tokens with A < 0.
    """
    log_T = log_ratio(logprobs_T, old_logprobs_T)
    log_w_T = sequence_sum(log_T.detach(), sequence_T).clamp(math.log(1e-8), MAX_LOG_RATIO)
    is_up_T = advantages_T >= 0
    k_T = torch.where(is_up_T, k_pos, k_neg)
    lambda_T = torch.where(is_up_T, lambda_pos, lambda_neg)
    phi_T = (k_T * log_w_T + lambda_T * (1 - log_w_T.exp())).exp()
    return TokenLoss(-phi_T * advantages_T * logprobs_T, {**ratio_stats(log_T), "sequence_weight": phi_T})
