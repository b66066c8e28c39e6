"""Policy losses: per-token terms, before any weight or mean.

Separate from aggregation: a loss here says what one token contributes, `aggregate.py` says how much each token counts, and
the trainer's loss is the sum of both multiplied. So no loss needs to know a batch, and gradients of micro-batches add up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyturn.core.errors import ConfigError, did_you_mean
from polyturn.core.registry import Registry
from polyturn.core.signature import has_parameter, takes_any_keyword

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this before `exp`: beyond it nothing is trained anyway, and exp(89) is infinite in float32."""


class TokenLoss(NamedTuple):
    """What a policy loss returns, one entry per token."""

    loss_T: Tensor
    stats: dict[str, Tensor]
    """Detached [T] figures to be averaged over tokens: clip_fraction, ratio, approx_kl."""


PolicyLoss = Callable[..., TokenLoss]
"""(logprobs_T, old_logprobs_T, advantages_T, **options) -> TokenLoss. One that has a parameter `sequence_T` is also told
which tokens belong together: equal numbers for the tokens of one sample."""

policy_losses: Registry[PolicyLoss] = Registry("policy_losses")


@policy_losses.register("ppo_clip")
def ppo_clip(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprob - old_logprob).

    Source: Schulman et al. 2017 (PPO), equation 7; separate bounds: Yu et al. 2025 (DAPO), equation 8.

    Args:
        logprobs_T: [T] log-probabilities under the policy, with gradient.
        old_logprobs_T: [T] those of the policy that the ratio compares with.
        advantages_T: [T].
        clip_low: How far below 1 the ratio may go.
        clip_high: How far above 1.
        dual_clip: c > 1 bounds the loss of a negative advantage to -c A (Ye et al. 2020, equation 5); None leaves it open.
    """
    old_T = old_logprobs_T.detach()
    log_ratio_T = (logprobs_T - old_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_T = log_ratio_T.exp()
    open_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_T = torch.maximum(open_T, clipped_T)
    is_clipped_T = clipped_T > open_T
    if dual_clip is not None:
        bound_T = -advantages_T * dual_clip
        is_bounded_T = (advantages_T < 0) & (bound_T < loss_T)
        loss_T = torch.where(is_bounded_T, bound_T, loss_T)
        is_clipped_T = is_clipped_T | is_bounded_T
    with torch.no_grad():
        stats = {
            "clip_fraction": is_clipped_T.to(loss_T.dtype),
            "ratio": ratio_T.detach(),
            # k3 of the policy that sampled against the present one, Schulman 2020: E_old[(r - 1) - log r].
            "approx_kl": (ratio_T - 1.0 - log_ratio_T).detach(),
        }
    return TokenLoss(loss_T, stats)


def bind(loss: PolicyLoss, *, offered: Mapping[str, Any], kwargs: Mapping[str, Any]) -> PolicyLoss:
    """Return `loss` with its options, to be called as (logprobs_T, old_logprobs_T, advantages_T, sequence_T).

    Args:
        loss: The policy loss.
        offered: What every loss may use; it gets those that it has a parameter for.
        kwargs: Options of its own, which win.

    Raises:
        ConfigError: it has no parameter for one of `kwargs`.
    """
    takes_any = takes_any_keyword(loss)
    if not takes_any and (unknown := [name for name in kwargs if not has_parameter(loss, name)]):
        known = [name for name in inspect.signature(loss).parameters if not name.endswith("_T")]
        raise ConfigError(f"the policy loss takes no option {unknown[0]!r}.{did_you_mean(unknown[0], known)}")
    options = {**{k: v for k, v in offered.items() if has_parameter(loss, k)}, **kwargs}
    needs_sequences = has_parameter(loss, "sequence_T")

    def call(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, sequence_T: Tensor) -> TokenLoss:
        told = {"sequence_T": sequence_T} if needs_sequences else {}
        return loss(logprobs_T, old_logprobs_T, advantages_T, **told, **options)

    return call
