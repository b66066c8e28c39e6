"""The loss that balances the load of a router's experts.

    f_e = E / (K T) * tokens of the sequence that went to expert e        P_e = mean over its tokens of softmax(logits)_e
    L   = sum over e of f_e P_e                                           1 if f and P are uniform, at most E

Source: Fedus et al. 2022 (Switch Transformers), equations 4 to 6, computed per sequence as in DeepSeek 2024 (DeepSeek-V3),
equations 17 to 20, because a mean over a micro-batch would depend on how the step was cut. Only P has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def balance_loss(
    logits_NE: Tensor,
    chosen_NK: Tensor,
    index_M: Tensor,
    row_M: Tensor,
    *,
    num_rows: int,
    added_up: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Tensor:
    """Return [B] the loss of each of `num_rows` sequences at one router.

    Args:
        logits_NE: [N, E] the router's logits.
        chosen_NK: [N, K] the experts of each token.
        index_M: [M] indices on axis N of the tokens of all sequences; a token that several sequences share appears once for
            each.
        row_M: [M] the sequence of each of these tokens.
        num_rows: B.
        added_up: Adds up a tensor over the ranks among which the tokens of the sequences are split.
    """
    count, experts = chosen_NK.shape[1], logits_NE.shape[1]
    probs_NE = torch.softmax(logits_NE.to(torch.promote_types(logits_NE.dtype, torch.float32)), dim=-1)
    taken_NE = torch.zeros_like(probs_NE).scatter_(1, chosen_NK, 1.0)
    # Concatenate the three sums, so that ranks that split a sequence communicate only once.
    of_token_NX = torch.cat([probs_NE, taken_NE, torch.ones_like(probs_NE[:, :1])], dim=1)
    blank_BX = torch.zeros((num_rows, 2 * experts + 1), dtype=probs_NE.dtype, device=row_M.device)
    sums_BX = added_up(blank_BX.index_add(0, row_M, of_token_NX[index_M]))
    probs_BE, taken_BE, length_B1 = sums_BX.split([experts, experts, 1], dim=1)
    return (taken_BE * (experts / count) / length_B1 * (probs_BE / length_B1)).sum(dim=1)
