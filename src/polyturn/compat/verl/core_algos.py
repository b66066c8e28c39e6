"""verl.trainer.ppo.core_algos: estimators, losses and their registries, as pure functions on padded tensors [B, R].

    @register_adv_est("mine")
    def mine(token_level_rewards, response_mask, index=None, config=None, **kwargs): return advantages, returns

What is registered here is also registered natively, under the same name, so a configuration may say `advantage: mine`. The
native side sees one group at a time and rows of its own length; `as_estimator` turns a group into a padded batch and back.
"""

from __future__ import annotations

import contextvars
from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyturn.algorithms import kl, losses
from polyturn.algorithms.advantages import Estimator, advantages
from polyturn.core.arrays import Floats
from polyturn.core.errors import ConfigError, UnknownNameError, did_you_mean
from polyturn.core.sample import TrainSample
from polyturn.core.signature import has_parameter, takes_any_keyword

AdvFn = Callable[..., tuple[Tensor, Tensor]]
"""(token_level_rewards [B, R], response_mask [B, R], …) -> (advantages [B, R], returns [B, R])."""
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


def register_adv_est(name_or_enum: str | AdvantageEstimator) -> Callable[[AdvFn], AdvFn]:
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


def get_adv_estimator_fn(name_or_enum: str | AdvantageEstimator) -> AdvFn:
    """Return a registered estimator.

    Raises:
        UnknownNameError: there is none of that name.
    """
    name = _name(name_or_enum)
    if name not in ADV_ESTIMATOR_REGISTRY:
        raise UnknownNameError(f"Unknown advantage estimator {name!r}.{did_you_mean(name, ADV_ESTIMATOR_REGISTRY)}")
    return ADV_ESTIMATOR_REGISTRY[name]


def register_policy_loss(name: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Return a decorator that registers a policy loss, here and natively; a name that is taken is replaced here."""

    def add(fn: PolicyLossFn) -> PolicyLossFn:
        POLICY_LOSS_REGISTRY[name] = fn
        if name not in losses.policy_losses:
            losses.policy_losses.register(name)(as_policy_loss(fn))
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


def as_estimator(fn: AdvFn) -> Estimator:
    """Return a native estimator that calls `fn` with one group as a padded batch: a row per trajectory.

    A row holds the tokens of all samples of a trajectory, the mask is where they are weighted, and the reward stands on the
    last weighted token unless the samples bring rewards per token.
    """

    def estimate(rewards_G: Any, samples_G: Sequence[Sequence[TrainSample]], **options: Any) -> list[list[Floats]]:
        rows = [sum(len(s.token_ids) for s in samples) for samples in samples_G]
        width = max([*rows, 1])
        mask_GR = torch.zeros(len(rows), width)
        rewards_GR = torch.zeros(len(rows), width)
        values_GR = torch.zeros(len(rows), width)
        for g, (samples, reward) in enumerate(zip(samples_G, np.asarray(rewards_G).tolist(), strict=True)):
            if samples:
                weights = np.concatenate([s.loss_weights for s in samples])
                mask_GR[g, : len(weights)] = torch.from_numpy((weights != 0).astype(np.float32))
            if samples and all(s.rewards is not None for s in samples):
                given = np.concatenate([np.asarray(s.rewards, np.float32) for s in samples])
                rewards_GR[g, : len(given)] = torch.from_numpy(given)
            else:
                weighted = mask_GR[g].nonzero()
                rewards_GR[g, int(weighted[-1]) if len(weighted) else 0] = reward
            if samples and all(s.values is not None for s in samples):
                known = np.concatenate([np.asarray(s.values, np.float32) for s in samples])
                values_GR[g, : len(known)] = torch.from_numpy(known)
        offered = {"index": np.zeros(len(rows), dtype=object), "values": values_GR, "config": _Config(options), **options}
        wanted = {k: v for k, v in offered.items() if has_parameter(fn, k)}
        if takes_any_keyword(fn):
            wanted = {k: v for k, v in offered.items() if k != "values" or has_parameter(fn, "values")}
        found_GR, _ = fn(token_level_rewards=rewards_GR, response_mask=mask_GR, **wanted)
        out: list[list[Floats]] = []
        for g, samples in enumerate(samples_G):
            row, at, parts = (found_GR[g] * mask_GR[g]).detach().numpy().astype(np.float32), 0, []
            for sample in samples:
                parts.append(row[at : at + len(sample.token_ids)].copy())
                at += len(sample.token_ids)
            out.append(parts)
        return out

    return estimate


_captured: contextvars.ContextVar[list[Tensor] | None] = contextvars.ContextVar("captured", default=None)


def as_policy_loss(fn: PolicyLossFn) -> Callable[..., losses.TokenLoss]:
    """Return a native policy loss that calls `fn`; its per-token loss is what it hands to `agg_loss`.

    Raises (when called):
        ConfigError: `fn` does not aggregate with `agg_loss`.
    """

    def loss(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, **options: Any) -> losses.TokenLoss:
        seen: list[Tensor] = []
        token = _captured.set(seen)
        try:
            rows = [t.unsqueeze(0) for t in (old_logprobs_T, logprobs_T, advantages_T)]
            _, *rest = fn(*rows, torch.ones_like(rows[0]), "token-mean", _Config(options))
        finally:
            _captured.reset(token)
        if not seen:
            raise ConfigError(
                f"the policy loss {fn.__name__!r} must aggregate with agg_loss of verl.trainer.ppo.core_algos, so that the "
                "loss of each token can be weighted over the whole batch"
            )
        metrics = rest[0] if rest and isinstance(rest[0], dict) else {}
        stats = {str(k): torch.as_tensor(v).detach().expand(logprobs_T.shape) for k, v in metrics.items()}
        return losses.TokenLoss(torch.stack(seen).sum(0).squeeze(0), stats)

    return loss


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
    the row's sum or mean. seq-mean-token-sum-norm: the sum over `loss_scale_factor`, by default the width. token-sum: sum.

    Raises:
        UnknownNameError: there is no such mode.
    """
    if (seen := _captured.get()) is not None:
        seen.append(loss_mat)
    mask = loss_mask.to(loss_mat.dtype)
    masked = torch.where(loss_mask.bool(), loss_mat, torch.zeros_like(loss_mat))
    sums_B, counts_B = masked.sum(-1), mask.sum(-1)
    num_rows = (counts_B > 0).sum() if global_batch_size is None else global_batch_size
    if loss_agg_mode == "token-mean":
        return masked.sum() / (mask.sum() if batch_num_tokens is None else batch_num_tokens) * dp_size
    if loss_agg_mode == "token-sum":
        return masked.sum()
    if loss_agg_mode == "seq-mean-token-sum":
        return sums_B.sum() / num_rows * dp_size
    if loss_agg_mode == "seq-mean-token-mean":
        return (sums_B / counts_B.clamp(min=1)).sum() / num_rows * dp_size
    if loss_agg_mode == "seq-mean-token-sum-norm":
        return masked.sum() / (loss_mat.shape[-1] if loss_scale_factor is None else loss_scale_factor)
    modes = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    raise UnknownNameError(f"Invalid loss_agg_mode: {loss_agg_mode}.{did_you_mean(loss_agg_mode, modes)}")


def _shipped(name: AdvantageEstimator) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register one of verl's own estimators, here alone: natively, its name may stand for a native one."""

    def add(fn: AdvFn) -> AdvFn:
        ADV_ESTIMATOR_REGISTRY[name.value] = fn
        return fn

    return add


# Estimators. scores_B is the sum of a row's rewards; index_B says which group a row belongs to.


@_shipped(AdvantageEstimator.GRPO)
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Centre scores in their group, and divide by the group's spread (Shao et al. 2024; without it Liu et al. 2025)."""
    scores_B = token_level_rewards.sum(-1)
    out_B = torch.zeros_like(scores_B)
    for rows in _groups(index):
        mean, std = (scores_B[rows].mean(), scores_B[rows].std()) if len(rows) > 1 else (0.0, 1.0)
        out_B[rows] = (scores_B[rows] - mean) / (std + epsilon) if norm_adv_by_std_in_grpo else scores_B[rows] - mean
    return _spread(out_B, response_mask)


@_shipped(AdvantageEstimator.GRPO_PASSK)
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Give the best of each group its lead over the second best, and the others 0.

    Raises:
        ValueError: a group of one.
    """
    scores_B = token_level_rewards.sum(-1)
    out_B = torch.zeros_like(scores_B)
    for rows in _groups(index):
        if len(rows) < 2:
            raise ValueError(f"Pass@k requires at least 2 samples per group; group {index[rows[0]]!r} has {len(rows)}")
        top = torch.topk(scores_B[rows], 2)
        lead = top.values[0] - top.values[1]
        best = rows[int(top.indices[0])]
        out_B[best] = lead / (scores_B[rows].std() + epsilon) if norm_adv_by_std_in_grpo else lead
    return _spread(out_B, response_mask)


@_shipped(AdvantageEstimator.RLOO)
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any, epsilon: float = 1e-6, config: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Compare each score with the mean of the others of its group (Ahmadian et al. 2024)."""
    scores_B = token_level_rewards.sum(-1)
    out_B = scores_B.clone()
    for rows in _groups(index):
        if (n := len(rows)) > 1:
            out_B[rows] = (scores_B[rows] - scores_B[rows].mean()) * n / (n - 1)
    return _spread(out_B, response_mask)


@_shipped(AdvantageEstimator.OPO)
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any, epsilon: float = 1e-6, config: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Subtract the group's mean weighted by length (Hao et al. 2025)."""
    scores_B, lengths_B = token_level_rewards.sum(-1), response_mask.sum(-1).to(token_level_rewards.dtype)
    out_B = scores_B.clone()
    for rows in _groups(index):
        if len(rows) > 1:
            total = lengths_B[rows].sum().clamp(min=1)
            out_B[rows] = scores_B[rows] - (scores_B[rows] * lengths_B[rows]).sum() / total
    return _spread(out_B, response_mask)


@_shipped(AdvantageEstimator.GPG)
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Centre scores in their group and scale by the share of rows that scored at all (Chu et al. 2025)."""
    scores_B = token_level_rewards.sum(-1)
    scale = len(scores_B) / scores_B.count_nonzero().clamp(min=1)
    out_B = torch.zeros_like(scores_B)
    for rows in _groups(index):
        mean = scores_B[rows].mean() if len(rows) > 1 else 0.0
        out_B[rows] = scale * (scores_B[rows] - mean) / f_norm
    return _spread(out_B, response_mask)


@_shipped(AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE)
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any, epsilon: float = 1e-6, config: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Centre scores in their group, then normalise over all tokens of the batch (Hu et al. 2025)."""
    scores_B = token_level_rewards.sum(-1)
    out_B = scores_B.clone()
    for rows in _groups(index):
        if len(rows) > 1:
            out_B[rows] = scores_B[rows] - scores_B[rows].mean()
    centred, _ = _spread(out_B, response_mask)
    whitened = masked_whiten(centred, response_mask) * response_mask
    return whitened, whitened


@_shipped(AdvantageEstimator.REINFORCE_PLUS_PLUS)
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Take discounted returns and normalise them over all tokens; returns are carried across observations."""
    gamma = 1.0 if config is None or config.get("gamma") is None else config.get("gamma")
    returns, running = torch.zeros_like(token_level_rewards), torch.zeros_like(token_level_rewards[:, 0])
    mask = response_mask.bool()
    for t in reversed(range(token_level_rewards.shape[1])):
        discounted = torch.where(mask[:, t], gamma * running, running)
        running = token_level_rewards[:, t] + discounted
        returns[:, t] = running
    whitened = masked_whiten(returns, response_mask) * response_mask
    return whitened, returns * response_mask


@_shipped(AdvantageEstimator.REMAX)
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Compare returns with the reward of a greedy answer (Li et al. 2023)."""
    returns = (token_level_rewards * response_mask).flip(-1).cumsum(-1).flip(-1)
    return returns - reward_baselines.unsqueeze(-1) * response_mask, returns


@_shipped(AdvantageEstimator.GAE)
def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: Any = 1.0, lam: Any = 1.0
) -> tuple[Tensor, Tensor]:
    """Estimate generalised advantages over the unmasked tokens alone (Schulman et al. 2016), normalised; and returns."""
    mask, running = response_mask.to(values.dtype), torch.zeros_like(values[:, 0])
    following, found = torch.zeros_like(values[:, 0]), torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        delta = token_level_rewards[:, t] + gamma * following - values[:, t]
        here = delta + gamma * lam * running
        found[:, t] = running = mask[:, t] * here + (1 - mask[:, t]) * running
        following = mask[:, t] * values[:, t] + (1 - mask[:, t]) * following
    return masked_whiten(found, response_mask), found + values


ADV_ESTIMATOR_REGISTRY["grpo_vectorized"] = compute_grpo_outcome_advantage
ADV_ESTIMATOR_REGISTRY["rloo_vectorized"] = compute_rloo_outcome_advantage


# Losses.


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
    given = (lambda key, default: default) if config is None else (lambda key, default: config.get(key) or default)
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
    return agg_loss(loss_mat=loss_mat, loss_mask=response_mask, loss_agg_mode=loss_agg_mode), metrics


POLICY_LOSS_REGISTRY["vanilla"] = compute_policy_loss_vanilla


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


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the unmasked values."""
    return torch.where(mask.bool(), values, torch.zeros_like(values)).sum() / (mask.sum() + 1e-8)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Return the values with mean 0 and variance 1 (unbiased) over the unmasked ones."""
    mean, count = masked_mean(values, mask), mask.sum()
    variance = masked_mean((values - mean) ** 2, mask) * count / (count - 1).clamp(min=1)
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    return whitened if shift_mean else whitened + mean


class _Config(dict[str, Any]):
    """Options that are read like verl's configs: `config.gamma`, `config.get("gamma", 1.0)`; what is not there is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)


def _name(name_or_enum: str | AdvantageEstimator) -> str:
    return name_or_enum.value if isinstance(name_or_enum, AdvantageEstimator) else str(name_or_enum)


def _groups(index: Any) -> list[list[int]]:
    rows: dict[Any, list[int]] = defaultdict(list)
    for row, group in enumerate(index.tolist() if isinstance(index, Tensor | np.ndarray) else index):
        rows[group].append(row)
    return list(rows.values())


def _spread(out_B: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return [B, R] each row's value on its unmasked tokens, as advantages and as returns."""
    found = out_B.unsqueeze(-1) * response_mask
    return found, found
