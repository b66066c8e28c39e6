"""verl's reductions of token losses, and the conversion of a loss written for verl to a native one.

agg_loss(loss_BR, mask_BR, "token-mean")  ->  a scalar
as_policy_loss(fn)                        ->  a native loss: the token losses that `fn` passes to `agg_loss`
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyturn.algorithms import losses
from polyturn.compat.verl.batch_estimator import Options
from polyturn.core.code_origin import defined_at
from polyturn.core.errors import ConfigError, UnknownNameError, did_you_mean

PolicyLossFn = Callable[..., tuple[Any, ...]]
"""(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, …) -> (scalar loss, metrics)."""

_captured: contextvars.ContextVar[list[tuple[Tensor, Tensor]] | None] = contextvars.ContextVar("captured", default=None)
"""The (token losses, result) pairs of `agg_loss` calls while a policy loss runs in training."""


def as_policy_loss(fn: PolicyLossFn) -> Callable[..., losses.TokenLoss]:
    """Return a native policy loss that calls `fn` with a padded batch of one row per sample.

    The token losses are the arguments that `fn` passes to `agg_loss`. As `fn` sees only one micro-batch of a step, the
    trainer averages them over the step, by `algorithm.aggregate`; the mode that `fn` passes to `agg_loss` has no effect.

    Raises (when called):
        ConfigError: the result of `fn` is not the result of `agg_loss`.
    """

    def loss(
        logprobs_T: Tensor,
        old_logprobs_T: Tensor,
        advantages_T: Tensor,
        *,
        sequence_T: Tensor | None = None,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = 3.0,
        **options: Any,
    ) -> losses.TokenLoss:
        clips = {"clip_ratio": clip_low, "clip_ratio_low": clip_low, "clip_ratio_high": clip_high, "clip_ratio_c": dual_clip}
        known = {k: v for k, v in clips.items() if v is not None}
        row_T, column_T = _rows_and_columns(
            torch.zeros_like(logprobs_T, dtype=torch.long) if sequence_T is None else sequence_T
        )
        shape = (int(row_T.max()) + 1, int(column_T.max()) + 1) if len(row_T) else (0, 0)
        arguments = (old_logprobs_T, logprobs_T, advantages_T, torch.ones_like(logprobs_T))
        rows = [t.new_zeros(shape).index_put((row_T, column_T), t) for t in arguments]
        counts = {"batch_num_tokens": len(row_T), "global_batch_size": shape[0]}  # of these rows only
        info = {"dp_size": 1, **counts, "loss_scale_factor": None}
        config = Options({**known, "global_batch_info": info, "policy_loss": Options(options), **options})
        seen: list[tuple[Tensor, Tensor]] = []
        token = _captured.set(seen)
        try:
            returned, *rest = fn(*rows, "token-mean", config)
        finally:
            _captured.reset(token)
        sums = {"all": seen, "last": seen[-1:], "first": seen[:1]}
        meant = next((s for s in sums.values() if s and _is_sum(s, returned)), None)
        if meant is None:
            raise ConfigError(
                f"the policy loss {fn.__name__!r} must return the result of agg_loss (verl.trainer.ppo.core_algos), called "
                "with the loss of each token: the trainer averages these token losses over the whole step"
                f"{defined_at(fn)}"
            )
        metrics = rest[0] if rest and isinstance(rest[0], dict) else {}
        stats = {str(k): torch.as_tensor(v).detach().expand(logprobs_T.shape) for k, v in metrics.items()}
        return losses.TokenLoss(torch.stack([loss_mat for loss_mat, _ in meant]).sum(0)[row_T, column_T], stats)

    return loss


def _is_sum(seen: Sequence[tuple[Tensor, Tensor]], returned: Any) -> bool:
    """Return whether a loss is the sum of the results of `agg_loss`."""
    total = torch.stack([value.detach() for _, value in seen]).sum()
    return torch.allclose(total, torch.as_tensor(returned).detach().to(total), rtol=1e-4, atol=1e-6, equal_nan=True)


def _rows_and_columns(sequence_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return [T] the row of each token (one row per sequence) and [T] its column."""
    row_T, count_B = torch.unique(sequence_T, return_inverse=True, return_counts=True)[1:]
    start_B = count_B.cumsum(0) - count_B
    order_T = row_T.argsort(stable=True)
    column_T = torch.empty_like(row_T)
    column_T[order_T] = torch.arange(len(row_T), device=row_T.device) - start_B[row_T[order_T]]
    return row_T, column_T


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Reduce [B, R] token losses to a scalar.

    token-mean: the mean over all unmasked tokens. seq-mean-token-sum and seq-mean-token-mean: the mean, over rows with an
    unmasked token, of the row's sum or mean. seq-mean-token-sum-norm: seq-mean-token-sum divided by `loss_scale_factor`, by
    default the width R. token-sum: the sum. All are multiplied by `dp_size`, because verl averages over processes.
    If given, `batch_num_tokens` (token-mean) or `global_batch_size` (seq-mean-*) is the number that a mean divides by.

    Raises:
        UnknownNameError: the mode is unknown.
        ConfigError: `dp_size` is above 1, and the mode needs `batch_num_tokens` or `global_batch_size`, which is missing.
    """
    value = _aggregate(loss_mat, loss_mask, loss_agg_mode, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor)
    if (seen := _captured.get()) is not None:
        seen.append((loss_mat, value))
    return value


def _aggregate(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int,
    batch_num_tokens: int | None,
    global_batch_size: int | None,
    loss_scale_factor: float | None,
) -> Tensor:
    mask = loss_mask.to(loss_mat.dtype)
    masked = torch.where(loss_mask.bool(), loss_mat, torch.zeros_like(loss_mat))
    sums_B, counts_B = masked.sum(-1), mask.sum(-1)
    if loss_agg_mode == "token-sum":
        return masked.sum() * dp_size
    if loss_agg_mode == "token-mean":
        return masked.sum() / _count(batch_num_tokens, mask.sum(), dp_size, name="batch_num_tokens") * dp_size
    if loss_agg_mode.startswith("seq-mean-"):
        num_rows = _count(global_batch_size, (counts_B > 0).sum(), dp_size, name="global_batch_size")
        if loss_agg_mode == "seq-mean-token-sum":
            return sums_B.sum() / num_rows * dp_size
        if loss_agg_mode == "seq-mean-token-mean":
            return (sums_B / counts_B.clamp(min=1)).sum() / num_rows * dp_size
        if loss_agg_mode == "seq-mean-token-sum-norm":
            scale = loss_mat.shape[-1] if loss_scale_factor is None else loss_scale_factor
            return sums_B.sum() / num_rows / scale * dp_size
    modes = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    raise UnknownNameError(f"Invalid loss_agg_mode: {loss_agg_mode}.{did_you_mean(loss_agg_mode, modes)}")


def _count(count: int | None, here: Tensor, dp_size: int, *, name: str) -> int | Tensor:
    """Return the number that a mean divides by: `count` of the whole batch, or `here` if this is the only process."""
    if count is None and dp_size > 1:
        raise ConfigError(f"(global) {name} is required when dp_size > 1; dp_size is {dp_size}")
    return here if count is None else count
