"""Sample one token for every row of a batch at once, each row with its own settings.

A pure function: logits and one uniform number per row in, tokens and logprobs out. A row's result depends only on that row,
so a seeded request is repeatable whatever else is in its batch.

Logprobs are log_softmax(logits / temperature) over the full vocabulary, before top-k and top-p; greedy rows (temperature 0)
report them at temperature 1. Rows with `keeps_support` draw from at most `MAX_SUPPORT` tokens, and their logprobs are
normalised over these tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polyturn.core.generation import MAX_SUPPORT


class Sampled(NamedTuple):
    """The tokens of one decoding step."""

    tokens: Tensor
    """[B] int64."""
    logprobs: Tensor
    """[B] float32; NaN if logits of the row are NaN."""
    support: Tensor | None
    """[B, MAX_SUPPORT] int64 the tokens that the row drew from, padded with -1. A row is all -1 if it is greedy, has neither
    top-k nor top-p, or does not keep its support. None without `keeps_support`, or if all rows are greedy."""


def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    uniform: Tensor,
    keeps_support: Tensor | None = None,
    banned: Tensor | None = None,
) -> Sampled:
    """Draw one token per row, by inverting the cumulative distribution at `uniform`.

    Args:
        logits: [B, V] of any float type.
        temperature: [B] float32; 0 is greedy.
        top_p: [B] float32 in (0, 1]; applied to the tokens left by top-k.
        top_k: [B] int64; 0 or less means no limit.
        uniform: [B] float64 in [0, 1), the random numbers; equal numbers give equal tokens.
        keeps_support: [B] bool; None means no row does.
        banned: [B, V] tokens that must not be drawn. Like top-k, it does not change the logprobs.
    """
    is_greedy = temperature == 0
    logprobs = torch.log_softmax(logits.float() / torch.where(is_greedy, 1.0, temperature).unsqueeze(1), dim=-1)
    support = None
    drawn_from = logprobs
    if banned is not None:
        drawn_from = logprobs.masked_fill(banned, float("-inf"))
        highest = drawn_from.amax(dim=-1, keepdim=True)
        # Without this, a banned token with nearly all of the probability would leave only zeros.
        drawn_from = drawn_from - torch.where(highest < -50, highest, 0.0)
    if bool(is_greedy.all()):
        tokens = drawn_from.argmax(dim=-1)
    else:
        probs = drawn_from.exp()
        is_cut = (top_p < 1) | (top_k > 0)
        keeps = None if keeps_support is None else keeps_support & is_cut & ~is_greedy
        if keeps is not None:
            top_k = torch.where(keeps & ((top_k <= 0) | (top_k > MAX_SUPPORT)), MAX_SUPPORT, top_k)
        limited = torch.nonzero(is_cut).squeeze(1)
        if len(limited):
            probs[limited] = _keep_top(probs[limited], top_p=top_p[limited], top_k=top_k[limited])
        # In float64, because single precision loses the tail of a vocabulary of 150,000.
        cdf = torch.cumsum(probs, dim=-1, dtype=torch.float64)
        tokens = torch.searchsorted(cdf, (uniform * cdf[:, -1]).unsqueeze(1), right=True).squeeze(1)
        tokens = tokens.clamp(max=cdf.shape[-1] - 1)  # NaN is beyond the last token
        tokens = torch.where(is_greedy, drawn_from.argmax(dim=-1), tokens)
        if keeps is not None:
            kept, support = probs.topk(min(MAX_SUPPORT, probs.shape[-1]), dim=-1)
            support = torch.where((kept > 0) & keeps.unsqueeze(1), support, -1)
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    if support is not None:
        of_support = logprobs.gather(1, support.clamp(min=0)).masked_fill(support < 0, float("-inf"))
        chosen = torch.where(support[:, 0] >= 0, chosen - of_support.logsumexp(dim=-1), chosen)
    return Sampled(tokens, chosen, support)


def _keep_top(probs: Tensor, *, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Return [B, V] `probs` with 0 at tokens that top-k, then top-p, drops; the most likely token always stays."""
    sorted_probs, order = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    limit = torch.where(top_k > 0, top_k, probs.shape[-1])
    kept = torch.where(ranks < limit.unsqueeze(1), sorted_probs, 0.0)
    kept = kept / kept.sum(dim=-1, keepdim=True)
    before = torch.cumsum(kept, dim=-1) - kept
    # With top_p = 1, rounding of the cumulative sum must not drop a token.
    is_dropped = (before >= top_p.unsqueeze(1)) & (top_p < 1).unsqueeze(1)
    is_dropped[:, 0] = False
    kept = kept.masked_fill(is_dropped, 0.0)
    return torch.zeros_like(probs).scatter_(1, order, kept)
