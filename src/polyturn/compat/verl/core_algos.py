"""verl.trainer.ppo.core_algos: estimators, losses and their registries, as pure functions on padded tensors [B, R].

    @register_adv_est("mine")
    def mine(token_level_rewards, response_mask, index=None, config=None, **kwargs): return advantages, returns

Functions registered here are also registered natively under the same name, so a configuration can use `advantage: mine`.
Native rows have different lengths; `as_estimator` converts a step to a padded batch and back.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from polyturn.algorithms import kl, losses
from polyturn.algorithms.advantages import advantages
from polyturn.compat.not_offered import __getattr__  # noqa: F401  (raises for names that are not offered)
from polyturn.compat.verl.batch_estimator import AdvFn, as_estimator
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
from polyturn.compat.verl.loss_aggregation import PolicyLossFn, agg_loss, as_policy_loss
from polyturn.compat.verl.torch_functional import masked_mean, masked_whiten
from polyturn.core.errors import ConfigError, UnknownNameError, did_you_mean
from polyturn.infra.plugins import is_same_source

__all__ = [
    "ADV_ESTIMATOR_REGISTRY", "POLICY_LOSS_REGISTRY", "AdvantageEstimator", "agg_loss", "as_estimator", "as_policy_loss",
    "compute_gae_advantage_return", "compute_gpg_outcome_advantage", "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage", "compute_grpo_vectorized_outcome_advantage", "compute_opo_outcome_advantage",
    "compute_policy_loss_dro", "compute_policy_loss_vanilla", "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage", "compute_remax_outcome_advantage", "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage", "compute_value_loss", "get_adv_estimator_fn", "get_policy_loss_fn",
    "kl_penalty", "masked_mean", "masked_whiten", "register_adv_est", "register_policy_loss",
]  # fmt: skip


class AdvantageEstimator(str, Enum):  # noqa: UP042  (users see the text of a member)
    """Names of verl's estimators."""

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
    """Return a decorator that registers an estimator, here and natively; it replaces polyturn's own one of that name.

    Raises:
        ConfigError: another function is registered under the name.
    """
    name = _name(name_or_enum)

    def add(fn: AdvFn) -> AdvFn:
        registered = ADV_ESTIMATOR_REGISTRY.get(name)
        if registered is not None and not is_same_source(registered, fn):
            raise ConfigError(f"Adv estimator {name} has already been registered: {registered} vs {fn}")
        if registered is not fn:
            ADV_ESTIMATOR_REGISTRY[name] = fn
            advantages.register(name, replace=True)(as_estimator(fn))
        return fn

    return add


def get_adv_estimator_fn(name_or_enum: str | Enum) -> AdvFn:
    """Return a registered estimator.

    Raises:
        UnknownNameError: the name is not registered.
    """
    name = _name(name_or_enum)
    if name not in ADV_ESTIMATOR_REGISTRY:
        raise UnknownNameError(f"Unknown advantage estimator simply: {name}.{did_you_mean(name, ADV_ESTIMATOR_REGISTRY)}")
    return ADV_ESTIMATOR_REGISTRY[name]


def register_policy_loss(name: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Return a decorator that registers a policy loss, here and natively, replacing an existing one."""

    def add(fn: PolicyLossFn) -> PolicyLossFn:
        POLICY_LOSS_REGISTRY[name] = fn
        losses.policy_losses.register(name, replace=True)(as_policy_loss(fn))
        return fn

    return add


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """Return a registered policy loss.

    Raises:
        UnknownNameError: the name is not registered.
    """
    if name not in POLICY_LOSS_REGISTRY:
        raise UnknownNameError(f"Unsupported loss mode: {name}.{did_you_mean(name, POLICY_LOSS_REGISTRY)}")
    return POLICY_LOSS_REGISTRY[name]


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
"""verl's own estimators, which are not registered natively, because native estimators may have the same names."""

ADV_ESTIMATOR_REGISTRY.update({name.value: fn for name, fn in _SHIPPED.items()})


def _on_tokens(matrix: Callable[..., tuple[Tensor, dict[str, Tensor]]]) -> PolicyLossFn:
    """Return a loss with verl's signature from `matrix`, which computes token losses and token metrics."""

    def compute(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        def setting(key: str, default: Any) -> Any:
            value = None if config is None else config.get(key)
            return default if value is None else value

        loss_mat, figures = matrix(old_log_prob, log_prob, advantages, setting)
        loss_mat = loss_mat if rollout_is_weights is None else loss_mat * rollout_is_weights
        loss = agg_loss(loss_mat, response_mask, loss_agg_mode, **setting("global_batch_info", {}))
        return loss, {name: float(masked_mean(value, response_mask)) for name, value in figures.items()}

    compute.__name__, compute.__doc__ = matrix.__name__, matrix.__doc__
    return compute


@_on_tokens
def compute_policy_loss_vanilla(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, option: Callable[[str, Any], Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped PPO loss with a bound for negative advantages, and its metrics."""
    clip = option("clip_ratio", 0.2)
    loss = losses.ppo_clip(
        log_prob,
        old_log_prob,
        advantages,
        clip_low=option("clip_ratio_low", clip),
        clip_high=option("clip_ratio_high", clip),
        dual_clip=option("clip_ratio_c", 3.0),
    )
    return loss.loss_T, {"actor/pg_clipfrac": loss.stats["clip_fraction"], "actor/ppo_kl": loss.stats["approx_kl"]}


@_on_tokens
def compute_policy_loss_dro(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, option: Callable[[str, Any], Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of direct reward optimisation (Richemond et al. 2024), -(log p A - beta / 2 (log p - log p_old)^2).

    Raises:
        ConfigError: `policy_loss.dro_beta` is not positive.
    """
    beta = option("policy_loss", {}).get("dro_beta") or 0.0
    if not beta > 0:
        raise ConfigError(f"the loss dro needs a positive policy_loss.dro_beta; it is {beta}")
    log_ratio = log_prob - old_log_prob
    return 0.5 * beta * log_ratio.square() - log_prob * advantages, {"actor/ppo_kl": -log_ratio.detach()}


POLICY_LOSS_REGISTRY["vanilla"] = compute_policy_loss_vanilla
POLICY_LOSS_REGISTRY["dro"] = compute_policy_loss_dro


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    *of_batch: Any,
    **of_batch_by_name: Any,
) -> tuple[Tensor, Tensor]:
    """Return half the squared error of predicted values, clipped around the old ones, and the clipped share.

    Arguments after `loss_agg_mode` are passed to `agg_loss`.
    """
    clipped = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    error, error_clipped = (vpreds - returns).square(), (clipped - returns).square()
    half = 0.5 * torch.maximum(error, error_clipped)
    loss = agg_loss(half, response_mask, loss_agg_mode, *of_batch, **of_batch_by_name)
    return loss, masked_mean((error_clipped > error).to(vpreds.dtype), response_mask)


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Return [B, R] estimates of KL(policy || reference): kl or k1, abs, mse or k2, low_var_kl or k3.

    A trailing "+" keeps the value but uses the gradient of k2, which is the gradient of the KL.

    Raises:
        NotImplementedError: the kind is unknown.
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
    raise NotImplementedError(f"the kl_penalty {kind!r} is not available; use kl, abs, mse or low_var_kl")


def _name(name_or_enum: str | Enum) -> str:
    return str(name_or_enum.value if isinstance(name_or_enum, Enum) else name_or_enum)
