"""Attention of several tokens per slot over the cache, on a CPU, without a copy of keys and values for every query head.

If several query heads share keys and there is a mask, transformers repeats keys and values first. That cost more than the
attention itself (measured: 5 of 7 ms a layer for 32 slots of 350 tokens). The CPU kernel needs no copy; other devices keep
transformers' code.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "polyturn_slots"

_Model = TypeVar("_Model", bound=PreTrainedModel)


def use(model: _Model) -> _Model:
    """Replace the attention of a model by `slot_attention` if it is transformers' "sdpa"; return the model."""
    text = model.config.get_text_config()
    if text._attn_implementation == "sdpa":
        text._attn_implementation = NAME
    return model


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return [B, Q, H, D] the attention of queries [B, H, Q, D] over keys and values [B, K, T, D]."""
    if attention_mask is None or query.device.type != "cpu" or query.shape[2] == 1:  # no copies are made for one token
        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return out
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
    )
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, slot_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
