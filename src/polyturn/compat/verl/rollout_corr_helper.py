"""verl.trainer.ppo.rollout_corr_helper: importance weights and rejection of tokens [B, R] that another policy sampled.

    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        old, rollout, response_mask, rollout_is="token", rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2")
    weights.batch["rollout_is_weights"]      min(rho, threshold), rho = old policy / rollout policy; "low_high": 0 outside
    mask                                     response_mask without what was rejected

The native side of the same is `algorithms/correction.py`, on samples of their own length. Both eras' names are read:
`token`, `sequence` and `geometric` bound rho itself; `token_k1` and its like bound a divergence, for k1 1 / rho.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyturn.algorithms.losses import MAX_LOG_RATIO as SAFETY_BOUND
from polyturn.algorithms.options import REJECTIONS
from polyturn.compat.verl.protocol import DataProto
from polyturn.compat.verl.torch_functional import masked_mean, masked_sum
from polyturn.core.errors import ConfigError, UnknownNameError, did_you_mean

SUPPORTED_ROLLOUT_RS_OPTIONS = set(REJECTIONS)
TOKEN_LEVEL_ROLLOUT_RS_OPTIONS = {name for name in REJECTIONS if name.startswith("token_")}
_FIRST_NAMES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""The first releases' name -> today's; theirs bound rho, today's 1 / rho."""

Threshold = str | float
Figures = dict[str, float]


class _Range(NamedTuple):
    low: float
    high: float


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: Threshold | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: Threshold | None = None,
    rollout_rs_threshold_lower: float | None = None,
    rollout_token_veto_threshold: float | None = None,
) -> tuple[DataProto | None, Tensor, Figures]:
    """Return the weights (None without `rollout_is`), the mask without what is rejected, and figures under rollout_corr/.

    Raises:
        ConfigError: shapes differ, no token is unmasked, or a threshold is missing or cannot be.
    """
    if not response_mask.any():
        raise ConfigError("response_mask must contain at least one valid token (1)")
    if not old_log_prob.shape == rollout_log_prob.shape == response_mask.shape:
        shapes = [tuple(t.shape) for t in (old_log_prob, rollout_log_prob, response_mask)]
        raise ConfigError(f"old_log_prob, rollout_log_prob and response_mask have the shapes {shapes}, which must be one")
    log_ratio, mask = old_log_prob - rollout_log_prob, response_mask.clone()
    weights, metrics = None, Figures()
    if rollout_is is not None and rollout_is_threshold is not None:
        found, figures = compute_rollout_correction_weights(
            log_ratio, response_mask, rollout_is, rollout_is_threshold, rollout_is_batch_normalize
        )
        weights, metrics = DataProto.from_dict({"rollout_is_weights": found}), metrics | figures
    if rollout_rs is not None:
        mask, figures = compute_rollout_rejection_mask(
            log_ratio, response_mask, rollout_rs, rollout_rs_threshold, rollout_rs_threshold_lower
        )
        metrics |= figures
    vetoed = torch.zeros_like(response_mask, dtype=torch.bool)
    if rollout_token_veto_threshold is not None:
        if rollout_token_veto_threshold <= 0:
            raise ConfigError(f"rollout_token_veto_threshold must be positive, got {rollout_token_veto_threshold}")
        vetoed = (log_ratio < math.log(rollout_token_veto_threshold)) & response_mask.bool()
        mask = mask * ~vetoed.any(-1, keepdim=True)
    metrics["rollout_is_veto_fraction"] = vetoed.any(-1).float().mean().item()
    metrics["rollout_is_catastrophic_token_fraction"] = masked_mean(vetoed.float(), response_mask).item()
    metrics |= compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    return weights, mask, {f"rollout_corr/{key}": value for key, value in metrics.items()}


def compute_rollout_correction_and_add_to_batch(batch: DataProto, rollout_corr_config: Any) -> tuple[DataProto, Figures]:
    """Return the batch with the mask and the weights that a config in verl's names asks for, and the figures."""
    names = (
        *("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold"),
        *("rollout_rs_threshold_lower", "rollout_token_veto_threshold"),
    )
    given = {name: rollout_corr_config.get(name) for name in names}
    tensors = (batch.batch[key] for key in ("old_log_probs", "rollout_log_probs", "response_mask"))
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        *tensors, **{name: value for name, value in given.items() if value is not None}
    )
    batch.batch["response_mask"] = mask
    return batch if weights is None else batch.union(weights), metrics


# --- weights --------------------------------------------------------------------------------------------------------------


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: Threshold = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, Figures]:
    """Return [B, R] weights: rho of each token, or of its sequence, up to the threshold; 0 where it is masked.

    Raises:
        ConfigError: an unknown level, or a threshold that cannot be.
        TypeError: the threshold is a boolean.
    """
    if rollout_is not in ("token", "sequence"):
        raise UnknownNameError(f"Invalid rollout_is: {rollout_is}. Must be one of token, sequence.")
    low, high = _weight_bounds(rollout_is_threshold)
    log = log_ratio if rollout_is == "token" else masked_sum(log_ratio, response_mask, -1).unsqueeze(-1)
    raw = _exp(log).expand_as(log_ratio) * response_mask
    inside = (raw <= high) if low is None else (raw >= low) & (raw <= high)
    weights = (raw.clamp(max=high) if low is None else torch.where(inside, raw, torch.zeros_like(raw))).detach()
    metrics = compute_is_metrics(weights, raw, log, response_mask, rollout_is, high, low)
    if low is not None:
        metrics["rollout_is_oob_ratio"] = masked_mean((~inside).float(), response_mask).item()
    if rollout_is_batch_normalize:
        rows = response_mask.any(-1)
        by_row = masked_mean(weights, response_mask, -1)[rows].mean()
        mean = masked_mean(weights, response_mask) if rollout_is == "token" else by_row
        factor = mean.item() if mean > 1e-8 else 1.0
        weights, metrics["rollout_is_batch_norm_factor"] = weights / factor, factor
    return weights, metrics


def compute_is_metrics(
    rollout_is_weights: Tensor,
    raw_rollout_is_weights: Tensor,
    log_ratio_for_metrics: Tensor,
    response_mask: Tensor,
    rollout_is: str,
    rollout_is_threshold: float,
    rollout_is_threshold_lower: float | None = None,
) -> Figures:
    """Return figures of weights [B, R]: of the applied ones, and the shares of raw ones outside the bounds."""
    low = 1 / rollout_is_threshold if rollout_is_threshold_lower is None else rollout_is_threshold_lower
    bounds, raw, mask = _Range(low, rollout_is_threshold), raw_rollout_is_weights, response_mask
    is_token = rollout_is == "token"
    ends = rollout_is_weights[mask.bool()] if is_token else _exp(log_ratio_for_metrics)
    applied = rollout_is_weights.clamp(0.0, rollout_is_threshold)
    mean = masked_mean(applied, mask)
    figures = {
        "mean": masked_mean(rollout_is_weights, mask).item(),
        "max": ends.max().item(),
        "min": ends.min().item(),
        "std": (masked_mean(applied.square(), mask) - mean.square()).clamp(min=0).sqrt().item(),
        # (mean w)^2 / mean w^2, Kong 1992
        "eff_sample_size": 1 / masked_mean((applied / (mean + 1e-8)).square(), mask).item(),
        **_shares(raw if is_token else ends, bounds, mask if is_token else None, name="ratio_fraction"),
        **_row_figures(masked_mean(rollout_is_weights, mask, -1), 1.0),
        **_shares(masked_mean(raw, mask, -1), bounds, None, name="seq_fraction"),
    }
    return {f"rollout_is_{key}": value for key, value in figures.items()}


def _weight_bounds(given: Threshold) -> tuple[float | None, float]:
    """Return the bounds of weights: (None, 2.0) of 2.0, which cuts, and (0.5, 5.0) of "0.5_5.0", which drops."""
    if isinstance(given, bool):
        raise TypeError("rollout_is_threshold is a number or 'low_high', not a boolean")
    low, high = _numbers(given, name="rollout_is_threshold")
    return low, high


# --- rejection ------------------------------------------------------------------------------------------------------------


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: Threshold | None = None,
    rollout_rs_threshold_lower: float | None = None,
) -> tuple[Tensor, Figures]:
    """Return the mask without the tokens and sequences that some criterion rejects, and figures.

    Args:
        log_ratio: [B, R] old minus rollout log-probabilities.
        response_mask: [B, R].
        rollout_rs: Criteria, separated by commas.
        rollout_rs_threshold: One bound for all of them, or one for each, separated by commas; of k1 "low_high", or the
            higher one, of which the lower is the inverse.
        rollout_rs_threshold_lower: The lower bound, in the first releases.
    """
    options = dict.fromkeys(option.strip() for option in rollout_rs.split(",") if option.strip())
    for option in options:
        if option not in SUPPORTED_ROLLOUT_RS_OPTIONS | _FIRST_NAMES.keys():
            known = sorted(SUPPORTED_ROLLOUT_RS_OPTIONS)
            raise UnknownNameError(f"Invalid rollout_rs option: {option!r}.{did_you_mean(option, known)}")
    keep, metrics = torch.ones_like(response_mask, dtype=torch.bool), Figures()
    for option, spec in zip(options, _specs(rollout_rs_threshold, len(options)), strict=True):
        name, is_first = _FIRST_NAMES.get(option, option), option in _FIRST_NAMES
        is_ratio = name.endswith("_k1")
        low, high = _numbers(spec, name=f"rollout_rs_threshold of {option}")
        if low is not None and not is_ratio:
            raise ConfigError(f"rollout_rs_threshold of {option!r} is one upper bound, without '_', not {spec!r}")
        low = rollout_rs_threshold_lower if low is None else low
        bounds = _Range(1 / high if low is None else low, high) if is_ratio else _Range(-math.inf, high)
        if is_ratio and not is_first:
            bounds = _Range(math.log(bounds.low), math.log(bounds.high))
        value = _measure(log_ratio, response_mask, name)
        value = _exp(-value) if is_first else value
        kept = (value >= bounds.low) & (value <= bounds.high)
        keep &= kept
        figures = _criterion(value, kept, response_mask, bounds, is_token=name.startswith("token"))
        prefix = "rollout_rs" if is_first else f"rollout_rs_{option}"
        metrics |= {f"{prefix}_{key}": number for key, number in figures.items()}
    rejected = ~keep & response_mask.bool()
    metrics["rollout_rs_masked_fraction"] = masked_mean(rejected.float(), response_mask).item()
    metrics["rollout_rs_seq_masked_fraction"] = rejected.any(-1).float().mean().item()
    return (response_mask * keep).to(response_mask.dtype), metrics


_ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log: -log,
    "k2": lambda log: 0.5 * log.square(),
    "k3": lambda log: torch.expm1(log) - log,
}


def _measure(log_ratio: Tensor, mask: Tensor, name: str) -> Tensor:
    """Return [B, R] the divergence that a criterion bounds: of each token, or of its sequence."""
    level, _, kind = name.rpartition("_")
    value = _ESTIMATES[kind](log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND))
    if level == "token":
        return value
    if level == "seq_max":
        rows = value.masked_fill(~mask.bool(), -math.inf).amax(-1)
        rows = rows.masked_fill(~mask.any(-1), 0.0)
    else:
        rows = (masked_sum if level == "seq_sum" else masked_mean)(value, mask, -1)
    return rows.unsqueeze(-1).expand_as(value)


def _criterion(value: Tensor, kept: Tensor, mask: Tensor, bounds: _Range, *, is_token: bool) -> Figures:
    """Return the figures of one criterion."""
    rows = masked_mean(value, mask, -1)[mask.any(-1)]
    ends = value[mask.bool()] if is_token else rows
    clamped = value.clamp(max(bounds.low, 0.0) if math.isinf(bounds.low) else bounds.low, bounds.high)
    variance = masked_mean(clamped.square(), mask) - masked_mean(clamped, mask).square()
    rejected = ~kept & mask.bool()
    return {
        "mean": masked_mean(value, mask).item(),
        "max": ends.max().item(),
        "min": ends.min().item(),
        "std": variance.clamp(min=0).sqrt().item(),
        **_shares(ends, bounds, None, name="fraction"),
        **_row_figures(rows, 0.0),
        **_shares(rows, bounds, None, name="seq_fraction"),
        "masked_fraction": masked_mean(rejected.float(), mask).item(),
        "seq_masked_fraction": rejected.any(-1)[mask.any(-1)].float().mean().item(),
    }


def _specs(given: Threshold | None, num: int) -> list[str]:
    if given is None:
        raise ConfigError("rollout_rs_threshold must be provided for rejection sampling")
    specs = [part.strip() for part in str(given).split(",") if part.strip()]
    if len(specs) not in (1, num):
        raise ConfigError(
            f"rollout_rs_threshold {given!r} has {len(specs)} bounds; write one, or one for each of {num} criteria"
        )
    return specs * num if len(specs) == 1 else specs


def _numbers(given: Threshold, *, name: str) -> tuple[float | None, float]:
    """Return (low, high) of "low_high", and (None, high) of one number."""
    parts = str(given).strip().split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError as problem:
        raise ConfigError(f"the {name} is {given!r}; it is a number, or 'low_high'") from problem
    if len(numbers) > 2 or min(numbers) <= 0 or numbers != sorted(numbers):
        raise ConfigError(f"the {name} is {given!r}; it is a positive number, or 'low_high' with low <= high")
    return (None if len(numbers) == 1 else numbers[0]), numbers[-1]


# --- figures --------------------------------------------------------------------------------------------------------------


def compute_offpolicy_metrics(old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor) -> Figures:
    """Return how far the old policy is from the one that sampled: perplexities, k1, k3, and chi-squared of both levels."""
    trained = masked_mean(old_log_prob, response_mask, -1)
    figures = {"training_ppl": (-trained).exp().mean(), "training_log_ppl": (-trained).mean()}
    if rollout_log_prob is not None:
        log = old_log_prob - rollout_log_prob
        sampled = masked_mean(rollout_log_prob, response_mask, -1)
        gap = sampled - trained
        figures |= {
            "kl": masked_mean(-log, response_mask),
            "k3_kl": masked_mean(torch.expm1(log) - log, response_mask),
            "rollout_ppl": (-sampled).exp().mean(),
            "rollout_log_ppl": (-sampled).mean(),
            "log_ppl_diff": gap.mean(),
            "log_ppl_abs_diff": gap.abs().mean(),
            "log_ppl_diff_max": gap.max(),
            "log_ppl_diff_min": gap.min(),
            "ppl_ratio": gap.exp().mean(),
            "chi2_token": masked_mean(_exp(log).square(), response_mask) - 1,
            "chi2_seq": _exp(masked_sum(log, response_mask, -1)).square().mean() - 1,
        }
    return {key: float(value.detach()) for key, value in figures.items()}


def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> Mapping[str, float]:
    """Return `compute_offpolicy_metrics` under rollout_corr/."""
    found = compute_offpolicy_metrics(log_prob, rollout_log_prob, response_mask)
    return {f"rollout_corr/{key}": value for key, value in found.items()}


def _exp(log: Tensor) -> Tensor:
    return log.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()


def _shares(values: Tensor, bounds: _Range, mask: Tensor | None, *, name: str) -> Figures:
    """Return the shares of values above and below bounds."""
    mean = (lambda hit: hit.float().mean()) if mask is None else (lambda hit: masked_mean(hit.float(), mask))
    return {f"{name}_high": mean(values > bounds.high).item(), f"{name}_low": mean(values < bounds.low).item()}


def _row_figures(rows: Tensor, ideal: float) -> Figures:
    return {
        "seq_mean": rows.mean().item(),
        "seq_std": rows.std().item() if len(rows) > 1 else 0.0,
        "seq_max": rows.max().item(),
        "seq_min": rows.min().item(),
        "seq_max_deviation": (rows - ideal).abs().max().item(),
    }
