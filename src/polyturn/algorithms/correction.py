"""Off-policy correction: weights and rejection of tokens that were sampled by another policy than the trained one.

    mu      the policy that sampled the token: the engine's weights at that time and its arithmetic (rollout_logprobs)
    pi      the policy at the start of the step, in the trainer's arithmetic (old_logprobs); also called "proximal" policy
    theta   the policy that is being updated; the policy loss compares it with pi

    rho = pi / mu      a weight made from rho multiplies the policy loss; the loss weight of a rejected token becomes 0

With any policy loss on top this is decoupled PPO, E_mu[rho min(r A, clip(r) A)] with r = theta / pi (Hilton et al. 2022,
"Batch size-invariance for policy optimization", equation 3; Fu et al. 2025, AReaL, equation 5). If the engine's weights
changed in the middle of a completion, mu is for each token the version that sampled it, so rho is still right.

A sequence is a segment: the trained tokens of one sample. Everything is computed over the whole batch of a step before the
batch is cut into micro-batches, so gradients do not depend on the cut (I7).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from polyturn.algorithms.losses import MAX_LOG_RATIO
from polyturn.algorithms.losses.divergence import binary_kl
from polyturn.algorithms.options import CorrectionSettings
from polyturn.core.errors import TrainingError
from polyturn.core.metrics import Max, Mean, Metrics, Sum
from polyturn.core.sample import TrainSample

_LAST_LAG = 3


class Corrected(NamedTuple):
    """Samples with `correction` set and loss weight 0 at rejected tokens, and the metrics."""

    samples: list[TrainSample]
    metrics: Metrics


def correct(samples: Sequence[TrainSample], settings: CorrectionSettings, *, version: int | None = None) -> Corrected:
    """Weigh and reject the trained tokens of a step's samples.

    Args:
        samples: All samples of the step, with old_logprobs and rollout_logprobs; `negative_bound` needs advantages.
        settings: Weights, bounds and rejections.
        version: Policy version of pi. If given, metrics also report the difference of mu and pi by the number of versions
            that the sampling weights were behind pi.

    Raises:
        TrainingError: samples lack log-probabilities.
    """
    indices = [np.flatnonzero(s.loss_weights) for s in samples]
    logs = [_log_ratio(s, p) for s, p in zip(samples, indices, strict=True)]
    raw = [_weights(log, settings.weight) for log in logs]
    # Cap the weights before dividing by their mean: otherwise a single weight of e^20 would shrink all others to almost 0.
    limited = [np.where(w > settings.cap, settings.cap if settings.beyond == "truncate" else 0.0, w) for w in raw]
    num_tokens = sum(len(p) for p in indices)
    if settings.normalize and num_tokens:
        mean = sum(float(w.sum()) for w in limited) / num_tokens
        limited = [w / mean if mean > 0 else w for w in limited]
    kept = [_keep(s, p, log, settings) for s, p, log in zip(samples, indices, logs, strict=True)]
    out = []
    for sample, index_T, weight, keep in zip(samples, indices, limited, kept, strict=True):
        correction = np.zeros(len(sample), np.float32)
        correction[index_T] = weight
        loss_weights = sample.loss_weights.copy()
        # Set the loss weight to 0, not the correction: rejected tokens are then also left out of the average and of the KL
        # and entropy terms.
        loss_weights[index_T[~keep]] = 0.0
        arrays = {"correction": correction} if settings.weight != "none" else {}
        out.append(sample.replace(**arrays) if keep.all() else sample.replace(loss_weights=loss_weights, **arrays))
    metrics = _divergence(samples, indices, logs, version)
    if num_tokens:
        metrics |= _weight_figures(raw, limited, settings)
        lost = [k for k, p in zip(kept, indices, strict=True) if len(p)]
        metrics["tokens/dropped_rejected"] = Sum(sum(int((~k).sum()) for k in lost))
        metrics["policy/correction_rejected_share"] = Mean(sum(int((~k).sum()) for k in lost), num_tokens)
        metrics["policy/correction_rejected_sequences"] = Mean(sum(not k.any() for k in lost), len(lost))
    return Corrected(out, metrics)


def _log_ratio(sample: TrainSample, index_T: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return [n] log pi - log mu of the trained tokens."""
    for name, array in (("old_logprobs", sample.old_logprobs), ("rollout_logprobs", sample.rollout_logprobs)):
        if array is None:
            raise TrainingError(
                f"off-policy correction compares old_logprobs with rollout_logprobs; sample {sample.id} has no {name}"
            )
    assert sample.old_logprobs is not None and sample.rollout_logprobs is not None
    # In float64: a sequence sums thousands of differences of nearly equal numbers.
    difference = sample.old_logprobs[index_T].astype(np.float64) - sample.rollout_logprobs[index_T].astype(np.float64)
    clamped: NDArray[np.float64] = np.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return clamped


def _weights(log: NDArray[np.float64], kind: str) -> NDArray[np.float64]:
    """Return [n] importance weights: exp(l_t), exp(sum l) or exp(mean l)."""
    if kind == "none" or not len(log):
        return np.ones(len(log))
    if kind == "token":
        return np.exp(log)
    value = log.sum() if kind == "sequence" else log.mean()
    return np.full(len(log), np.exp(np.clip(value, -MAX_LOG_RATIO, MAX_LOG_RATIO)))


def measure(log: NDArray[np.float64], name: str) -> NDArray[np.float64]:
    """Return [n] the quantity that `reject` bounds: for k1 the ratio exp(l), for k2 l^2 / 2, for k3 exp(l) - 1 - l."""
    level, _, kind = name.rpartition("_")
    value = {"k1": log, "k2": 0.5 * log**2, "k3": np.expm1(log) - log}[kind]
    if level != "token":
        over = value.sum() if level == "seq_sum" else value.mean() if level == "seq_mean" else value.max()
        value = np.full(len(log), over)
    return np.exp(np.clip(value, -MAX_LOG_RATIO, MAX_LOG_RATIO)) if kind == "k1" else value


def _binary_kl(sample: TrainSample, index_T: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return [n] KL(mu || pi) of the two-outcome distributions "this token, or another", in nats, as KPop's mask uses it."""
    assert sample.old_logprobs is not None and sample.rollout_logprobs is not None
    mu, pi = (torch.from_numpy(a[index_T].astype(np.float64)) for a in (sample.rollout_logprobs, sample.old_logprobs))
    return binary_kl(mu, pi).numpy()


def _keep(
    sample: TrainSample, index_T: NDArray[np.intp], log: NDArray[np.float64], settings: CorrectionSettings
) -> NDArray[np.bool_]:
    keep = np.ones(len(index_T), bool)
    if not len(index_T):
        return keep
    for name, (low, high) in settings.bounds.items():
        value = _binary_kl(sample, index_T) if name == "token_binary_kl" else measure(log, name)
        keep &= (value >= low) & (value <= high)
    # Compare the smallest ratio, because one impossible token hardly changes a mean over thousands of tokens.
    if settings.veto is not None and np.exp(log.min()) < settings.veto:
        keep[:] = False
    if settings.negative_bound is not None:
        if sample.advantages is None:
            raise TrainingError(
                f"algorithm.loss.correction.negative_bound needs advantages, and sample {sample.id} has none"
            )
        if sample.advantages[index_T].mean() < 0 and -log.mean() > settings.negative_bound:
            keep[:] = False
    return keep


def _weight_figures(
    raw: Sequence[NDArray[np.float64]], limited: Sequence[NDArray[np.float64]], settings: CorrectionSettings
) -> Metrics:
    if settings.weight == "none":
        return {}
    before, after = np.concatenate(raw), np.concatenate(limited)
    count, total = len(after), float(after.sum())
    return {
        "policy/correction_weight": Mean(total, count),
        "policy/correction_weight_max": Max(float(before.max())),
        "policy/correction_capped_share": Mean(int((before > settings.cap).sum()), count),
        # (sum w)^2 / (n sum w^2), Kong 1992: the share of the tokens that an unweighted batch of equal variance would have.
        "policy/correction_effective_share": Mean(total**2 / (count * float((after**2).sum())) if total else 0.0),
    }


def _divergence(
    samples: Sequence[TrainSample],
    indices: Sequence[NDArray[np.intp]],
    logs: Sequence[NDArray[np.float64]],
    version: int | None,
) -> Metrics:
    """Return metrics of the divergence of pi from mu, over all trained tokens, before weighting and rejection."""
    log = np.concatenate([*logs, np.zeros(0)])
    if not len(log):
        return {}
    means = np.array([one.mean() for one in logs if len(one)])
    sums = np.clip([one.sum() for one in logs if len(one)], -MAX_LOG_RATIO, MAX_LOG_RATIO)
    metrics: Metrics = {
        "policy/off_policy_kl": Mean(float(-log.sum()), len(log)),  # k1 of KL(mu || pi)
        "policy/off_policy_k3": Mean(float((np.expm1(log) - log).sum()), len(log)),
        "policy/off_policy_chi2": Mean(float(np.expm1(2 * log).sum()), len(log)),  # E_mu[rho^2] - 1
        "policy/off_policy_chi2_sequence": Mean(float(np.expm1(2 * sums).sum()), len(sums)),
        # log perplexity under pi minus log perplexity under mu, per sequence.
        "policy/off_policy_ppl_gap": Mean(float(-means.sum()), len(means)),
    }
    versions = [s.versions[p] for s, p in zip(samples, indices, strict=True) if s.versions is not None]
    if version is not None and len(versions) == len(samples):
        lags = np.clip(version - np.concatenate(versions), 0, _LAST_LAG)
        for lag in np.unique(lags).tolist():
            here = np.abs(log[lags == lag])
            name = f"policy/off_policy_difference_lag{lag}" + ("plus" if lag == _LAST_LAG else "")
            metrics[name] = Mean(float(here.sum()), len(here))
    return metrics
