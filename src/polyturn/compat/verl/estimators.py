"""Advantage estimators on padded tensors, with verl's names and arguments, as pure functions.

    token_level_rewards [B, R]   response_mask [B, R]   index [B], the group of each row
    ->  (advantages [B, R], returns [B, R])

A row's score is the sum of its rewards, `scores_B`; the baseline of a group of one is 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyturn.compat.verl.torch_functional import masked_whiten


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Centre scores in their group and divide by the group's std (Shao et al. 2024; without division Liu et al. 2025)."""
    scores_B = token_level_rewards.sum(-1)
    out_B = torch.zeros_like(scores_B)
    for rows in _groups(index):
        mean, std = (scores_B[rows].mean(), scores_B[rows].std()) if len(rows) > 1 else (0.0, 1.0)
        divisor = std + epsilon if norm_adv_by_std_in_grpo else 1.0
        out_B[rows] = (scores_B[rows] - mean) / (divisor or 1.0)  # 1 if it is 0, as for equal scores and an epsilon of 0
    return _spread(out_B, response_mask)


def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Give the best row of each group its lead over the second best, and the others 0.

    Raises:
        ValueError: a group has only one row.
    """
    scores_B = token_level_rewards.sum(-1)
    out_B = torch.zeros_like(scores_B)
    for rows in _groups(index):
        if len(rows) < 2:
            raise ValueError(f"Pass@k requires at least 2 samples per group; group {index[rows[0]]!r} has {len(rows)}")
        top = torch.topk(scores_B[rows], 2)
        lead = top.values[0] - top.values[1]
        best = rows[int(top.indices[0])]
        divisor = scores_B[rows].std() + epsilon if norm_adv_by_std_in_grpo else 1.0
        out_B[best] = lead / (divisor or 1.0)
    return _spread(out_B, response_mask)


def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any, epsilon: float = 1e-6, config: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Subtract the mean score of the other rows in the group (Ahmadian et al. 2024)."""
    out_B = token_level_rewards.sum(-1)
    for rows in _groups(index, least=2):
        out_B[rows] = (out_B[rows] - out_B[rows].mean()) * len(rows) / (len(rows) - 1)
    return _spread(out_B, response_mask)


def compute_opo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any, epsilon: float = 1e-6, config: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Subtract the group's mean weighted by length (Hao et al. 2025)."""
    out_B, lengths_B = token_level_rewards.sum(-1), response_mask.sum(-1).to(token_level_rewards.dtype)
    for rows in _groups(index, least=2):
        out_B[rows] -= (out_B[rows] * lengths_B[rows]).sum() / lengths_B[rows].sum().clamp(min=1)
    return _spread(out_B, response_mask)


def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Centre scores in their group and divide by the share of rows with a nonzero score (Chu et al. 2025)."""
    scores_B = token_level_rewards.sum(-1)
    scale = len(scores_B) / scores_B.count_nonzero().clamp(min=1)
    return _spread(scale * _centred(scores_B, index) / f_norm, response_mask)


def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any, epsilon: float = 1e-6, config: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Centre scores in their group, then normalise over all tokens of the batch (Hu et al. 2025)."""
    centred, _ = _spread(_centred(token_level_rewards.sum(-1), index), response_mask)
    whitened = masked_whiten(centred, response_mask) * response_mask
    return whitened, whitened


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Normalise discounted returns over all tokens; returns are carried across observations."""
    discount = config.get("gamma") if isinstance(config, Mapping) else None if config is None else config.gamma
    gamma = 1.0 if discount is None else discount
    returns, running = torch.zeros_like(token_level_rewards), torch.zeros_like(token_level_rewards[:, 0])
    mask = response_mask.bool()
    for t in reversed(range(token_level_rewards.shape[1])):
        discounted = torch.where(mask[:, t], gamma * running, running)
        running = token_level_rewards[:, t] + discounted
        returns[:, t] = running
    whitened = masked_whiten(returns, response_mask) * response_mask
    return whitened, returns * response_mask


def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Subtract the reward of a greedy answer from returns (Li et al. 2023)."""
    returns = (token_level_rewards * response_mask).flip(-1).cumsum(-1).flip(-1)
    return returns - reward_baselines.unsqueeze(-1) * response_mask, returns


def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: Any = 1.0, lam: Any = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantages over the unmasked tokens (Schulman et al. 2016), normalised, and returns."""
    mask, running = response_mask.to(values.dtype), torch.zeros_like(values[:, 0])
    following, advantages = torch.zeros_like(values[:, 0]), torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        delta = token_level_rewards[:, t] + gamma * following - values[:, t]
        here = delta + gamma * lam * running
        advantages[:, t] = running = mask[:, t] * here + (1 - mask[:, t]) * running
        following = mask[:, t] * values[:, t] + (1 - mask[:, t]) * following
    return masked_whiten(advantages, response_mask), advantages + values


def _centred(scores_B: Tensor, index: Any) -> Tensor:
    """Return [B] each score minus the mean of its group; the score of a group of one is unchanged."""
    out_B = scores_B.clone()
    for rows in _groups(index, least=2):
        out_B[rows] -= scores_B[rows].mean()
    return out_B


def _groups(index: Any, *, least: int = 1) -> list[list[int]]:
    """Return the rows of each group with at least `least` rows."""
    rows: dict[Any, list[int]] = defaultdict(list)
    for row, group in enumerate(index.tolist() if isinstance(index, Tensor | np.ndarray) else index):
        rows[group].append(row)
    return [group for group in rows.values() if len(group) >= least]


def _spread(out_B: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return [B, R] each row's value on its unmasked tokens, twice: as advantages and as returns."""
    spread = out_B.unsqueeze(-1) * response_mask
    return spread, spread
