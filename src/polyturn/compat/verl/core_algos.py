"""verl.trainer.ppo.core_algos: estimators, losses and their registries, as pure functions on padded tensors [B, R].

    @register_adv_est("mine")
    def mine(token_level_rewards, response_mask, index=None, config=None, **kwargs): return advantages, returns

What is registered here is also registered natively, under the same name, so a configuration may say `advantage: mine`. The
native side has rows of their own length; `as_estimator` turns a step into a padded batch and back.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from polyturn.algorithms import kl, losses
from polyturn.algorithms.advantages import advantages
from polyturn.compat.verl.batch_estimator import AdvFn, Options, as_estimator
from polyturn.compat.verl.estimators import (
    compute_gae_advantage_return,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from polyturn.compat.verl.torch_functional import masked_mean, masked_whiten
from polyturn.core.errors import ConfigError, UnknownNameError, did_you_mean

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "POLICY_LOSS_REGISTRY",
    "AdvantageEstimator",
    "agg_loss",
    "as_estimator",
    "as_policy_loss",
    "compute_gae_advantage_return",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_opo_outcome_advantage",
    "compute_policy_loss_dro",
    "compute_policy_loss_vanilla",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "compute_value_loss",
    "get_adv_estimator_fn",
    "get_policy_loss_fn",
    "kl_penalty",
    "masked_mean",
    "masked_whiten",
    "register_adv_est",
    "register_policy_loss",
]

PolicyLossFn = Callable[..., tuple[Any, ...]]
"""(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, …) -> (scalar loss, metrics)."""


class AdvantageEstimator(str, Enum):  # noqa: UP042  (users see the text of a member)
    """Names of the estimators of verl."""

    GAE = "gae"
    GRPO = "grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    OPO = "opo"
    GRPO_PASSK = "grpo_passk"
    GPG = "gpg"
    RLOO_VECTORIZED = "rloo_vectorized"
    GRPO_VECTORIZED = "grpo_vectorized"


ADV_ESTIMATOR_REGISTRY: dict[str, AdvFn] = {}
POLICY_LOSS_REGISTRY: dict[str, PolicyLossFn] = {}


def register_adv_est(name_or_enum: str | Enum) -> Callable[[AdvFn], AdvFn]:
    """Return a decorator that registers an estimator, here and natively.

    Raises:
        ConfigError: the name is taken by another function.
    """
    name = _name(name_or_enum)

    def add(fn: AdvFn) -> AdvFn:
        if ADV_ESTIMATOR_REGISTRY.setdefault(name, fn) is not fn:
            raise ConfigError(f"Adv estimator {name} has already been registered: {ADV_ESTIMATOR_REGISTRY[name]} vs {fn}")
        if name not in advantages:
            advantages.register(name)(as_estimator(fn))
        return fn

    return add


def get_adv_estimator_fn(name_or_enum: str | Enum) -> AdvFn:
    """Return a registered estimator.

    Raises:
        UnknownNameError: there is none of that name.
    """
    name = _name(name_or_enum)
    if name not in ADV_ESTIMATOR_REGISTRY:
        raise UnknownNameError(f"Unknown advantage estimator simply: {name}.{did_you_mean(name, ADV_ESTIMATOR_REGISTRY)}")
    return ADV_ESTIMATOR_REGISTRY[name]


def register_policy_loss(name: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Return a decorator that registers a policy loss, here and natively; what has that name gives way."""

    def add(fn: PolicyLossFn) -> PolicyLossFn:
        POLICY_LOSS_REGISTRY[name] = fn
        losses.policy_losses.register(name, replace=True)(as_policy_loss(fn))
        return fn

    return add


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """Return a registered policy loss.

    Raises:
        UnknownNameError: there is none of that name.
    """
    if name not in POLICY_LOSS_REGISTRY:
        raise UnknownNameError(f"Unsupported loss mode: {name}.{did_you_mean(name, POLICY_LOSS_REGISTRY)}")
    return POLICY_LOSS_REGISTRY[name]


_captured: contextvars.ContextVar[list[tuple[Tensor, Tensor]] | None] = contextvars.ContextVar("captured", default=None)
"""What `agg_loss` was given and what it returned, while a policy loss runs in training."""


def as_policy_loss(fn: PolicyLossFn) -> Callable[..., losses.TokenLoss]:
    """Return a native policy loss that calls `fn` with a padded batch: a row per sample.

    Its loss of each token is what it hands to `agg_loss`. How tokens are averaged is the trainer's matter, because a
    micro-batch is a part of a step: with a `loss_agg_mode` of its own the result is the same, weighted by
    `algorithm.aggregate`.

    Raises (when called):
        ConfigError: what `fn` returns is not what `agg_loss` made of its tokens.
    """

    def loss(
        logprobs_T: Tensor,
        old_logprobs_T: Tensor,
        advantages_T: Tensor,
        *,
        sequence_T: Tensor | None = None,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        **options: Any,
    ) -> losses.TokenLoss:
        clips = {"clip_ratio": clip_low, "clip_ratio_low": clip_low, "clip_ratio_high": clip_high, "clip_ratio_c": dual_clip}
        known = {k: v for k, v in clips.items() if v is not None}
        config = Options({**known, "policy_loss": Options(options), **options})
        row_T, column_T = _places(torch.zeros_like(logprobs_T, dtype=torch.long) if sequence_T is None else sequence_T)
        shape = (int(row_T.max()) + 1, int(column_T.max()) + 1) if len(row_T) else (0, 0)
        given = (old_logprobs_T, logprobs_T, advantages_T, torch.ones_like(logprobs_T))
        rows = [t.new_zeros(shape).index_put((row_T, column_T), t) for t in given]
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
                f"the policy loss {fn.__name__!r} must return what agg_loss of verl.trainer.ppo.core_algos "
                "makes of its tokens, so that the loss of each token can be weighted over the whole batch"
            )
        metrics = rest[0] if rest and isinstance(rest[0], dict) else {}
        stats = {str(k): torch.as_tensor(v).detach().expand(logprobs_T.shape) for k, v in metrics.items()}
        return losses.TokenLoss(torch.stack([loss_mat for loss_mat, _ in meant]).sum(0)[row_T, column_T], stats)

    return loss


def _is_sum(seen: Sequence[tuple[Tensor, Tensor]], returned: Any) -> bool:
    """Return whether a loss is the sum of what `agg_loss` returned."""
    total = torch.stack([value.detach() for _, value in seen]).sum()
    return torch.allclose(total, torch.as_tensor(returned).detach().to(total), rtol=1e-4, atol=1e-6, equal_nan=True)


def _places(sequence_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return [T] the row of each token, one per sequence, and its column, in order."""
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
    """Return [B, R] losses as one number.

    token-mean: over all unmasked tokens. seq-mean-token-sum and seq-mean-token-mean: over rows with any unmasked token, of
    the row's sum or mean. seq-mean-token-sum-norm: the first of these over `loss_scale_factor`, by default the width.
    token-sum: the sum. Each is `dp_size` times as large, so that the mean over so many processes is that of the whole batch.

    Raises:
        UnknownNameError: there is no such mode.
        ConfigError: there are several processes, and the mean needs a count of the whole batch that is not given.
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


def _count(given: int | None, here: Tensor, dp_size: int, *, name: str) -> int | Tensor:
    """Return how many tokens or rows a mean is over: those of the whole batch, which one process of many cannot count."""
    if given is None and dp_size > 1:
        raise ConfigError(f"(global) {name} is required when dp_size > 1; dp_size is {dp_size}")
    return here if given is None else given


compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage
compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage

_SHIPPED: dict[AdvantageEstimator, AdvFn] = {
    AdvantageEstimator.GRPO: compute_grpo_outcome_advantage,
    AdvantageEstimator.GRPO_PASSK: compute_grpo_passk_outcome_advantage,
    AdvantageEstimator.RLOO: compute_rloo_outcome_advantage,
    AdvantageEstimator.OPO: compute_opo_outcome_advantage,
    AdvantageEstimator.GPG: compute_gpg_outcome_advantage,
    AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE: compute_reinforce_plus_plus_baseline_outcome_advantage,
    AdvantageEstimator.REINFORCE_PLUS_PLUS: compute_reinforce_plus_plus_outcome_advantage,
    AdvantageEstimator.REMAX: compute_remax_outcome_advantage,
    AdvantageEstimator.GAE: compute_gae_advantage_return,
    AdvantageEstimator.GRPO_VECTORIZED: compute_grpo_outcome_advantage,
    AdvantageEstimator.RLOO_VECTORIZED: compute_rloo_outcome_advantage,
}
"""verl's own, known here alone: natively, such a name may stand for a native estimator."""

ADV_ESTIMATOR_REGISTRY.update({name.value: fn for name, fn in _SHIPPED.items()})


def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Return the clipped loss of PPO with a bound for negative advantages, and its metrics."""
    given = _reader(config)
    clip = given("clip_ratio", 0.2)
    found = losses.ppo_clip(
        log_prob,
        old_log_prob,
        advantages,
        clip_low=given("clip_ratio_low", clip),
        clip_high=given("clip_ratio_high", clip),
        dual_clip=given("clip_ratio_c", 3.0),
    )
    loss_mat = found.loss_T if rollout_is_weights is None else found.loss_T * rollout_is_weights
    mean = {k: float(masked_mean(v, response_mask)) for k, v in found.stats.items()}
    metrics = {"actor/pg_clipfrac": mean["clip_fraction"], "actor/ppo_kl": mean["approx_kl"]}
    return agg_loss(loss_mat, response_mask, loss_agg_mode, **given("global_batch_info", {})), metrics


def compute_policy_loss_dro(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Return the loss of direct reward optimisation (Richemond et al. 2024), -(log p A - beta / 2 (log p - log p_old)^2).

    Raises:
        ConfigError: `policy_loss.dro_beta` is not positive.
    """
    given = _reader(config)
    beta = (given("policy_loss", {}).get("dro_beta") or 0.0) if config is not None else 0.0
    if not beta > 0:
        raise ConfigError(f"the loss dro needs a positive policy_loss.dro_beta; it is {beta}")
    log_ratio = log_prob - old_log_prob
    loss_mat = 0.5 * beta * log_ratio.square() - log_prob * advantages
    loss_mat = loss_mat if rollout_is_weights is None else loss_mat * rollout_is_weights
    loss = agg_loss(loss_mat, response_mask, loss_agg_mode, **given("global_batch_info", {}))
    return loss, {"actor/ppo_kl": float(masked_mean(-log_ratio.detach(), response_mask))}


def _reader(config: Any) -> Callable[[str, Any], Any]:
    """Return a function that reads a key of a config, which may be None, with a default for what it leaves open."""
    return (lambda key, default: default) if config is None else (lambda key, default: config.get(key) or default)


POLICY_LOSS_REGISTRY["vanilla"] = compute_policy_loss_vanilla
POLICY_LOSS_REGISTRY["dro"] = compute_policy_loss_dro


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return half the squared error of predicted values, clipped around the earlier ones, and the share that was clipped."""
    clipped = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    error, error_clipped = (vpreds - returns).square(), (clipped - returns).square()
    loss = agg_loss(
        0.5 * torch.maximum(error, error_clipped),
        response_mask,
        loss_agg_mode,
        dp_size,
        batch_num_tokens,
        global_batch_size,
        loss_scale_factor,
    )
    return loss, masked_mean((error_clipped > error).to(vpreds.dtype), response_mask)


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Return [B, R] estimates of KL(policy || reference): kl or k1, abs, mse or k2, low_var_kl or k3.

    A trailing "+" keeps the value and takes the gradient of k2, which is that of the KL itself.

    Raises:
        NotImplementedError: another kind.
    """
    if kl_penalty.endswith("+"):
        value, through = _kl(logprob, ref_logprob, kl_penalty[:-1]), kl.k2(logprob, ref_logprob)
        return through - through.detach() + value.detach()
    return _kl(logprob, ref_logprob, kl_penalty)


def _kl(logprob: Tensor, ref_logprob: Tensor, kind: str) -> Tensor:
    if kind in ("kl", "k1"):
        return kl.k1(logprob, ref_logprob)
    if kind == "abs":
        return (logprob - ref_logprob).abs()
    if kind in ("mse", "k2"):
        return kl.k2(logprob, ref_logprob)
    if kind in ("low_var_kl", "k3"):
        return kl.k3(logprob, ref_logprob).clamp(-10, 10)
    raise NotImplementedError(f"the kl_penalty {kind!r} is not here; use kl, abs, mse or low_var_kl")


def _name(name_or_enum: str | Enum) -> str:
    return str(name_or_enum.value if isinstance(name_or_enum, Enum) else name_or_enum)
