"""Policy losses with another loss at a few tokens of large covariance, because these tokens reduce the entropy most.

    c_t = (A_t - mean A) (logprob_t - mean logprob)       means over all trained tokens of the optimizer step

Source: Cui et al. 2025 (The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models), equations 10 to 13.
The means and the choice need all tokens of the step. So the tokens are chosen before the step is split into micro-batches,
by the log-probabilities at its start (`old_logprobs`). If the rollouts are fresh, these are the policy's own.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyturn.algorithms.loss_options import CLIP_COV_LB, CLIP_COV_UB
from polyturn.algorithms.losses.base import TokenLoss, log_ratio, marks, ratio_stats
from polyturn.algorithms.losses.token import clipped


def covariance(old_logprobs_N: NDArray[np.float64], advantages_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [N] c_t, the contribution of each token to the covariance of log-probability and advantage."""
    centred: NDArray[np.float64] = (advantages_N - advantages_N.mean()) * (old_logprobs_N - old_logprobs_N.mean())
    return centred


def choose_within(
    old_logprobs_N: NDArray[np.float64],
    advantages_N: NDArray[np.float64],
    rng: np.random.Generator,
    *,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = CLIP_COV_LB,
    clip_cov_ub: float = CLIP_COV_UB,
) -> NDArray[np.bool_]:
    """Mark a share `clip_cov_ratio` of all tokens (at least one), drawn from those with clip_cov_lb < c < clip_cov_ub.

    If fewer tokens have such a c, mark all of these.
    """
    value_N = covariance(old_logprobs_N, advantages_N)
    able = np.flatnonzero((value_N > clip_cov_lb) & (value_N < clip_cov_ub))
    count = max(int(clip_cov_ratio * len(value_N)), 1)
    marked_N = np.zeros(len(value_N), bool)
    # Draw at random between the bounds, as in the source. Taking the largest c would always select the outliers.
    marked_N[rng.permutation(able)[:count]] = True
    return marked_N


def choose_largest(
    old_logprobs_N: NDArray[np.float64],
    advantages_N: NDArray[np.float64],
    rng: np.random.Generator,
    *,
    kl_cov_ratio: float = 2e-4,
) -> NDArray[np.bool_]:
    """Mark the share `kl_cov_ratio` of all tokens (at least one) with the largest c."""
    value_N = covariance(old_logprobs_N, advantages_N)
    marked_N = np.zeros(len(value_N), bool)
    # A stable sort, so that every machine breaks ties in the same way.
    marked_N[np.argsort(-value_N, kind="stable")[: max(int(kl_cov_ratio * len(value_N)), 1)]] = True
    return marked_N


@marks(choose_within)
def clip_cov(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    marks_T: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> TokenLoss:
    """Return PPO's clipped loss, with 0 at the marked tokens.

    Source: Cui et al. 2025, equations 10 and 11 (Clip-Cov).

    Args:
        marks_T: [T] 1 at the tokens that `choose_within` marked.
        clip_low: The ratio is clipped below 1 - clip_low.
        clip_high: The ratio is clipped above 1 + clip_high.
    """
    log_T = log_ratio(logprobs_T, old_logprobs_T)
    loss_T, is_clipped_T = clipped(log_T.exp(), advantages_T, clip_low=clip_low, clip_high=clip_high)
    stats = {**ratio_stats(log_T, is_clipped_T), "marked_share": marks_T}
    # Marked tokens still count in the mean, with a loss of 0, so that marking does not raise the weight of other tokens.
    return TokenLoss(torch.where(marks_T != 0, 0.0 * loss_T, loss_T), stats)


@marks(choose_largest)
def kl_cov(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    marks_T: Tensor,
    ppo_kl_coef: float = 1.0,
) -> TokenLoss:
    """Return -r A, and -r A + ppo_kl_coef |logprob - old_logprob| at the marked tokens.

    Source: Cui et al. 2025, equations 12 and 13 (KL-Cov).

    Args:
        marks_T: [T] 1 at the tokens that `choose_largest` marked.
        ppo_kl_coef: Weight of the penalty that keeps a marked token near its old probability.
    """
    log_T = log_ratio(logprobs_T, old_logprobs_T)
    # Not clamped, so that the penalty pulls a token back from any distance.
    far_T = (logprobs_T - old_logprobs_T.detach()).abs()
    loss_T = -advantages_T * log_T.exp() + marks_T * ppo_kl_coef * far_T
    return TokenLoss(loss_T, {**ratio_stats(log_T), "marked_share": marks_T})
