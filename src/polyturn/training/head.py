"""Compute scores of targets from hidden states in chunks: output embedding, log-softmax and entropy, with a custom backward.

    forward    hidden [S, H] -> logits of a chunk [V, C] -> log-sum-exp, log-probability, entropy      keeps [S] numbers
    backward   the logits of the chunk once more -> their gradient in place -> gradients of hidden and weight

Autograd would keep four arrays of [S, V], or compute them twice with checkpointing. Here one buffer holds a chunk's logits
and then their gradient. On a GPU the steps between the two matrix products are compiled (`Fusion`): one kernel reads the
logits as the product wrote them, in bfloat16 too, and no float32 copy exists.

On a CPU, logits are computed as [V, C] = weight @ hidden.T: with few targets and a large vocabulary, that is faster than
hidden @ weight.T. Compiled kernels get the same axes with the vocabulary contiguous.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyturn.core.errors import one_line
from polyturn.engines.onednn import OneDnnLinear, product

logger = logging.getLogger(__name__)

OUTSIDE = -1e30
"""The logit of a token outside the support: its probability is 0, and 0 times its log-probability is 0, not NaN."""


class HeadScores(NamedTuple):
    """The head's results for each target."""

    logprobs_S: Tensor
    entropy_S: Tensor | None


SWITCH = "POLYTURN_COMPILE_HEAD"
"""Environment variable; 0 never compiles."""


class Fusion:
    """Compiles the functions that it calls on chunks of targets; once one cannot be compiled, it calls all uncompiled."""

    def __init__(self, compiler: Callable[..., Callable[..., Any]] = torch.compile) -> None:
        """Compile with `compiler`."""
        self._compiled = functools.cache(compiler)
        self._is_possible = True

    def __call__(self, function: Callable[..., Any], logits_VC: Tensor, *args: Any) -> Any:
        """Return `function(logits_VC, *args)`. The last axis of every tensor is the targets; another number of targets does
        not compile the function again."""
        if not self._is_possible or logits_VC.shape[1] == 1:  # torch.compile fixes a size of 1
            return function(logits_VC, *args)
        import torch._dynamo  # seconds of imports, which only this class needs

        for tensor in (one for one in (logits_VC, *args) if isinstance(one, Tensor)):
            torch._dynamo.maybe_mark_dynamic(tensor, tensor.ndim - 1)
        try:
            return self._compiled(function)(logits_VC, *args)
        except torch._dynamo.exc.TorchDynamoException as problem:
            # Compiling fails before the function changes its arguments.
            self._is_possible = False
            logger.warning(
                "log-probabilities are computed without torch.compile, with more time and memory, because it failed: %s",
                one_line(problem)[:300],
            )
            return function(logits_VC, *args)


def compiles_on(device: torch.device) -> bool:
    """Return whether the head is compiled on `device`: on a GPU, unless `SWITCH` is 0."""
    return device.type == "cuda" and os.environ.get(SWITCH) != "0"


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
    fusion: Fusion | None = None,
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
        fusion: Compiles the steps between the matrix products; None does not.
    """
    inputs = (hidden_SH, head.weight, head.bias, targets_S, temperature_S, support_SK)
    logprobs_S, entropy_S = _Scores.apply(*inputs, entropy_grad, chunk, fusion)
    return HeadScores(logprobs_S, None if entropy_grad is None else entropy_S)


def outside(support_SK: Tensor, vocab: int) -> Tensor:
    """Return [S, V] whether each token is outside the support of each target. An empty support excludes no token."""
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
        fusion: Fusion | None,
    ) -> tuple[Tensor, Tensor]:
        run = fusion or _plainly
        logprobs_S = hidden_SH.new_empty(len(targets_S), dtype=_exact(hidden_SH.dtype))
        entropy_S, log_sum_S = torch.zeros_like(logprobs_S), torch.empty_like(logprobs_S)
        for part in _parts(len(targets_S), chunk):
            logits_VC = _logits(hidden_SH[part], weight_VH, bias_V, is_transposed=fusion is not None)
            temperature_C, is_outside_VC = _of(part, temperature_S, support_SK, len(weight_VH))
            chosen_C = logits_VC.gather(0, targets_S[None, part])[0].to(logprobs_S.dtype)
            if temperature_C is not None:
                chosen_C = chosen_C / temperature_C
            top_C, log_C, entropy_C = run(_summed, logits_VC, temperature_C, is_outside_VC, entropy_grad is not None)
            log_sum_S[part] = log_C + top_C
            logprobs_S[part] = (chosen_C - top_C) - log_C
            if entropy_C is not None:
                entropy_S[part] = entropy_C
        ctx.save_for_backward(
            hidden_SH, weight_VH, bias_V, targets_S, temperature_S, support_SK, log_sum_S, logprobs_S, entropy_S
        )
        ctx.has_entropy_grad, ctx.chunk, ctx.fusion = bool(entropy_grad), chunk, fusion
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy_S)
        return logprobs_S, entropy_S

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_SH, weight_VH, bias_V, targets_S, temperature_S, support_SK, log_sum_S, *scores_S = ctx.saved_tensors
        run = ctx.fusion or _plainly
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        grad_hidden_SH = torch.empty_like(hidden_SH) if of_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH) if of_weight else None
        grad_bias_V = torch.zeros_like(bias_V) if of_bias else None
        for part in _parts(len(targets_S), ctx.chunk):
            logits_VC = _logits(hidden_SH[part], weight_VH, bias_V, is_transposed=ctx.fusion is not None)
            temperature_C, is_outside_VC = _of(part, temperature_S, support_SK, len(weight_VH))
            logprobs_C, grad_C = scores_S[0][part], grads[0][part]
            entropy_C, grad_entropy_C = (scores_S[1][part], grads[1][part]) if ctx.has_entropy_grad else (None, None)
            run(_differentiate, logits_VC, temperature_C, is_outside_VC, log_sum_S[part], grad_C, entropy_C, grad_entropy_C)
            grad_VC = logits_VC
            # The entry of the target is set here; inside the function every token would be compared with the target.
            target_C = -torch.expm1(logprobs_C) * grad_C
            if entropy_C is not None and grad_entropy_C is not None:
                target_C -= logprobs_C.exp() * (logprobs_C + entropy_C) * grad_entropy_C
            if temperature_C is not None:
                target_C /= temperature_C
            grad_VC.scatter_(0, targets_S[None, part], target_C[None].to(grad_VC.dtype))
            if grad_hidden_SH is not None:
                grad_hidden_SH[part] = grad_VC.t() @ weight_VH
            if grad_weight_VH is not None:
                grad_weight_VH.addmm_(grad_VC, hidden_SH[part])
            if grad_bias_V is not None:
                grad_bias_V += grad_VC.sum(dim=1)
        return grad_hidden_SH, grad_weight_VH, grad_bias_V, *(None,) * 6


def _summed(
    logits_VC: Tensor, temperature_C: Tensor | None, is_outside_VC: Tensor | None, has_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return for each target the largest logit, the logarithm of the sum of exp(logit - largest), and the entropy. The
    logits serve as a buffer."""
    scaled_VC = _scaled(logits_VC, temperature_C, is_outside_VC)
    top_C = scaled_VC.amax(dim=0)
    scaled_VC.sub_(top_C)  # against cancellation of large logits below
    exp_VC = scaled_VC.exp() if has_entropy else scaled_VC.exp_()
    sum_C = exp_VC.sum(dim=0)
    log_C = sum_C.log()
    return top_C, log_C, log_C - scaled_VC.mul_(exp_VC).sum(dim=0) / sum_C if has_entropy else None


def _differentiate(
    logits_VC: Tensor,
    temperature_C: Tensor | None,
    is_outside_VC: Tensor | None,
    log_sum_C: Tensor,
    grad_C: Tensor,
    entropy_C: Tensor | None,
    grad_entropy_C: Tensor | None,
) -> None:
    """Replace the logits by their gradient, without the one-hot term of the target."""
    logprobs_VC = _scaled(logits_VC, temperature_C, is_outside_VC).sub_(log_sum_C)
    if entropy_C is None or grad_entropy_C is None:
        grad_VC = logprobs_VC.exp_().mul_(-grad_C)
    else:
        factor_VC = (logprobs_VC + entropy_C).mul_(grad_entropy_C).add_(grad_C)
        grad_VC = logprobs_VC.exp_().mul_(factor_VC).neg_()
    if temperature_C is not None:
        grad_VC.div_(temperature_C)
    logits_VC.copy_(grad_VC)


def _scaled(logits_VC: Tensor, temperature_C: Tensor | None, is_outside_VC: Tensor | None) -> Tensor:
    """Return the logits in at least float32, divided by the temperatures, and `OUTSIDE` for tokens outside the support."""
    # Compiled, the copy exists in registers only, but a change of an argument would be written back.
    scaled_VC = logits_VC.to(_exact(logits_VC.dtype), copy=torch.compiler.is_compiling())
    if temperature_C is not None:
        scaled_VC.div_(temperature_C)
    return scaled_VC if is_outside_VC is None else scaled_VC.masked_fill_(is_outside_VC, OUTSIDE)


def _plainly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _parts(size: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, size)) for start in range(0, size, chunk)]


def _of(
    part: slice, temperature_S: Tensor | None, support_SK: Tensor | None, vocab: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return [C] the temperatures of a part of the targets, and [V, C] the tokens outside their supports."""
    is_outside_VC = None if support_SK is None else outside(support_SK[part], vocab).t()
    return None if temperature_S is None else temperature_S[part], is_outside_VC


def _logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, *, is_transposed: bool) -> Tensor:
    """Return [V, C] the logits, in memory as [C, V] if `is_transposed`."""
    logits_VC = (hidden_CH @ weight_VH.t()).t() if is_transposed else product(weight_VH, hidden_CH)
    if bias_V is not None:
        logits_VC += bias_V[:, None]
    return logits_VC


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the type for log-probabilities. Rounding to bfloat16 would exceed the change by one optimizer step."""
    return torch.promote_types(dtype, torch.float32)
