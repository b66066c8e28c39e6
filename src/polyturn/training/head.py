"""Compute scores of targets from hidden states in chunks: output embedding, log-softmax and entropy, with a custom backward.

    forward    hidden [S, H] -> logits of a chunk [V, C] -> log-sum-exp, log-probability, entropy      keeps [S] numbers
    backward   the logits of the chunk once more -> their gradient in place -> gradients of hidden and weight

Autograd would keep four arrays of [S, V], or compute them twice with checkpointing. Here one buffer holds a chunk's logits
and then their gradient.

Logits are computed as [V, C] = weight @ hidden.T: for few targets and a large vocabulary, MKL computes that up to twice as
fast as hidden @ weight.T.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyturn.engines.onednn import OneDnnLinear, product

OUTSIDE = -1e30
"""The logit of a token outside the support: its probability is 0, and 0 times its log-probability is 0, not NaN."""


class HeadScores(NamedTuple):
    """The head's results for each target."""

    logprobs_S: Tensor
    entropy_S: Tensor | None


def is_plain(head: nn.Module | None) -> bool:
    """Return whether a head is a linear map with whole weights and without an adapter."""
    return isinstance(head, nn.Linear) and type(head) in (nn.Linear, OneDnnLinear) and not isinstance(head.weight, DTensor)


def target_scores(
    head: nn.Linear,
    hidden_SH: Tensor,
    targets_S: Tensor,
    temperature_S: Tensor | None,
    support_SK: Tensor | None = None,
    *,
    entropy_grad: bool | None,
    chunk: int,
) -> HeadScores:
    """Return the log-probability of each target, log_softmax(logits / temperature), and the entropy.

    Args:
        head: The output embedding, [V, H].
        hidden_SH: [S, H] the last hidden state at each target.
        targets_S: [S] int64, the tokens.
        temperature_S: [S] float32; None is 1.
        support_SK: [S, K] int64, the tokens that each target was drawn from; both results are over these tokens
            (`MicroBatch`).
        entropy_grad: None: no entropy. False: entropy without gradient. True: entropy with gradient.
        chunk: Number of targets per chunk.
    """
    scores = _Scores.apply(hidden_SH, head.weight, head.bias, targets_S, temperature_S, support_SK, entropy_grad, chunk)
    logprobs_S, entropy_S = scores
    return HeadScores(logprobs_S, None if entropy_grad is None else entropy_S)


def outside(support_SK: Tensor, vocab: int) -> Tensor:
    """Return [S, V] whether each token is outside the support of each target; False if the support is empty."""
    is_outside_SV = torch.ones(len(support_SK), vocab, dtype=torch.bool, device=support_SK.device)
    # Padding repeats the first token, so that writes do not conflict.
    ids_SK = torch.where(support_SK < 0, support_SK[:, :1], support_SK).clamp(min=0)
    return is_outside_SV.scatter_(1, ids_SK, False) & (support_SK[:, :1] >= 0)


class _Scores(torch.autograd.Function):
    """With p = softmax(l), l = logits / T: d logp(t) / dl = 1[t] - p, and dH / dl = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_S: Tensor,
        temperature_S: Tensor | None,
        support_SK: Tensor | None,
        entropy_grad: bool | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        size = len(targets_S)
        logprobs_S = hidden_SH.new_empty(size, dtype=_exact(hidden_SH.dtype))
        entropy_S, log_sum_S = torch.zeros_like(logprobs_S), torch.empty_like(logprobs_S)
        for part in _parts(size, chunk):
            logits_VC = _logits(hidden_SH, weight_VH, bias_V, temperature_S, support_SK, part)
            top_C = logits_VC.amax(dim=0)
            logits_VC.sub_(top_C)  # against cancellation of large logits below
            chosen_C = logits_VC.gather(0, targets_S[None, part])[0]
            exp_VC = logits_VC.exp_() if entropy_grad is None else logits_VC.exp()
            sum_C = exp_VC.sum(dim=0)
            log_C = sum_C.log()
            log_sum_S[part] = log_C + top_C
            logprobs_S[part] = chosen_C - log_C
            if entropy_grad is not None:
                entropy_S[part] = log_C - logits_VC.mul_(exp_VC).sum(dim=0) / sum_C
        ctx.save_for_backward(hidden_SH, weight_VH, bias_V, targets_S, temperature_S, support_SK, log_sum_S, entropy_S)
        ctx.has_entropy_grad, ctx.chunk = bool(entropy_grad), chunk
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy_S)
        return logprobs_S, entropy_S

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_SH, weight_VH, bias_V, targets_S, temperature_S, support_SK, log_sum_S, entropy_S = ctx.saved_tensors
        grad_logprobs_S, grad_entropy_S = grads
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        grad_hidden_SH = torch.empty_like(hidden_SH) if of_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH) if of_weight else None
        grad_bias_V = torch.zeros_like(bias_V) if of_bias else None
        for part in _parts(len(targets_S), ctx.chunk):
            logits_VC = _logits(hidden_SH, weight_VH, bias_V, temperature_S, support_SK, part)
            logprobs_VC = logits_VC.sub_(log_sum_S[part])
            if ctx.has_entropy_grad:
                factor_VC = (logprobs_VC + entropy_S[part]).mul_(grad_entropy_S[part]).add_(grad_logprobs_S[part])
                grad_VC = logprobs_VC.exp_().mul_(factor_VC).neg_()
            else:
                grad_VC = logprobs_VC.exp_().mul_(-grad_logprobs_S[part])
            grad_VC.scatter_add_(0, targets_S[None, part], grad_logprobs_S[None, part])
            if temperature_S is not None:
                grad_VC.div_(temperature_S[part])
            grad_VC = grad_VC.to(weight_VH.dtype)
            if grad_hidden_SH is not None:
                grad_hidden_SH[part] = grad_VC.t() @ weight_VH
            if grad_weight_VH is not None:
                grad_weight_VH.addmm_(grad_VC, hidden_SH[part])
            if grad_bias_V is not None:
                grad_bias_V += grad_VC.sum(dim=1)
        return grad_hidden_SH, grad_weight_VH, grad_bias_V, None, None, None, None, None


def _parts(size: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, size)) for start in range(0, size, chunk)]


def _logits(
    hidden_SH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    temperature_S: Tensor | None,
    support_SK: Tensor | None,
    part: slice,
) -> Tensor:
    """Return [V, C] the logits of a part of the targets, divided by their temperatures, in at least float32; `OUTSIDE` for
    tokens outside the support."""
    logits_VC = product(weight_VH, hidden_SH[part])
    if bias_V is not None:
        logits_VC += bias_V[:, None]
    logits_VC = logits_VC.to(_exact(logits_VC.dtype))
    if temperature_S is not None:
        logits_VC.div_(temperature_S[part])
    return (
        logits_VC if support_SK is None else logits_VC.masked_fill_(outside(support_SK[part], len(logits_VC)).t(), OUTSIDE)
    )


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the type for log-probabilities. Rounding to bfloat16 would exceed the change by one optimizer step."""
    return torch.promote_types(dtype, torch.float32)
