"""verl.utils.torch_functional: masked statistics for users' own estimators and policy losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from polyturn.compat.not_offered import __getattr__  # noqa: F401  (raises for names that are not offered)


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Return the sum of the unmasked values, over all axes or over `axis`; masked values may be infinite."""
    kept = torch.where(mask.bool(), values * mask, torch.zeros_like(values))
    return kept.sum() if axis is None else kept.sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Return the mean of the unmasked values, over all axes or over `axis`."""
    count = mask.sum() if axis is None else mask.sum(dim=axis)
    return masked_sum(values, mask, axis) / (count + 1e-8)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Return the variance of the unmasked values.

    Raises:
        ValueError: there are too few unmasked values.
    """
    count = mask.sum()
    if count < 1 + unbiased:
        raise ValueError(f"the variance of {int(count)} unmasked values is not defined; check the mask")
    variance = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    return variance * count / (count - 1) if unbiased else variance


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Return the values normalised to mean 0 and unbiased variance 1 over the unmasked ones."""
    mean, count = masked_mean(values, mask), mask.sum()
    variance = masked_mean((values - mean) ** 2, mask) * count / (count - 1).clamp(min=1)
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    return whitened if shift_mean else whitened + mean


def clip_by_value(x: Tensor, tensor_min: Tensor | float, tensor_max: Tensor | float) -> Tensor:
    """Return `x` clipped to bounds that may be tensors."""
    low, high = torch.as_tensor(tensor_min).to(x), torch.as_tensor(tensor_max).to(x)
    return torch.max(torch.min(x, high), low)


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Return [...] the log-probability of each label under [..., V] logits. `inplace_backward` has no effect."""
    return functional.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Return [...] the entropy of [..., V] logits."""
    logprobs = functional.log_softmax(logits, dim=-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Return [B, T] the position of each token among those with mask 1; 0 before the first."""
    return torch.clip(mask.cumsum(dim=-1) - 1, min=0)


def pad_sequence_to_length(tensors: Tensor, max_seq_len: int, pad_token_id: int, left_pad: bool = False) -> Tensor:
    """Return rows padded to [B, max_seq_len]; rows that are already as long are unchanged."""
    missing = max_seq_len - tensors.shape[-1]
    if missing <= 0:
        return tensors
    return functional.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Tensor, Tensor]:
    """Return ids and mask [B, max_length], padded, or cut on the side given by `truncation`.

    Raises:
        NotImplementedError: a row is too long and `truncation` is "error".
    """
    length = input_ids.shape[-1]
    if length < max_length:
        ids = pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad)
        return ids, pad_sequence_to_length(attention_mask, max_length, 0, left_pad)
    if length == max_length:
        return input_ids, attention_mask
    head = max_length // 2
    kept = {
        "left": torch.arange(length - max_length, length),
        "right": torch.arange(max_length),
        "middle": torch.cat([torch.arange(head), torch.arange(length - (max_length - head), length)]),
    }
    if truncation not in kept:
        raise NotImplementedError(f"sequence_length={length} is larger than max_length={max_length} ({truncation=})")
    return input_ids[..., kept[truncation]], attention_mask[..., kept[truncation]]


def tokenize_and_postprocess_data(
    prompt: str, tokenizer: Any, max_length: int, pad_token_id: int, left_pad: bool = True, truncation: str = "error"
) -> tuple[Tensor, Tensor]:
    """Return the ids and mask [1, max_length] of a text; see `postprocess_data`."""
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    return postprocess_data(encoded["input_ids"], encoded["attention_mask"], max_length, pad_token_id, left_pad, truncation)
