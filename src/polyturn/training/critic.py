"""Critic: the model's backbone with a value per position, trained to predict the return from that position on.

    sample      ids      [ p0 p1 a2 a3 o4 a5 o6 ]      values at the weighted tokens [ . . v2 v3 . v5 . ]
    row         input    [ p0 p1 a2 a3 o4 ]            v2 is read off column 1, where a2 is about to be sampled

v_t is the value of the state in which token t is sampled. It is read at the position that predicts token t, by the same
`layout` that shifts targets. Values exist at weighted tokens only, never at observations. The critic is a backend with its
own network and objective, in one process or over ranks.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from transformers import PreTrainedModel

from polyturn.batching.layout import LayoutSettings, MicroBatch
from polyturn.core.arrays import Floats
from polyturn.core.errors import TrainingError
from polyturn.core.metrics import Mean, Metrics, Sum
from polyturn.core.sample import TrainSample
from polyturn.tokens.multimodal import MediaProcessor
from polyturn.tokens.positions import MediaRows
from polyturn.training.backend import Backend, OverBackend, TermWeights
from polyturn.training.loss_terms import Objective, Terms
from polyturn.training.model import ScoringModel
from polyturn.training.model_backend import ModelBackend, Placement, fitting_layout
from polyturn.training.options import CriticSettings, OptimSettings

_NAMES = {
    "loss/total": "critic/value_loss",
    "critic/clip_fraction": "critic/clip_fraction",
    "loss/lr": "critic/lr",
    "loss/grad_norm": "critic/grad_norm",
    "loss/grad_norm_clipped": "critic/grad_norm_clipped",
    "loss/skipped_steps": "critic/skipped_steps",
}
"""Metric name of a backend -> name of the critic's metric."""


class Critic(OverBackend):
    """A trained value function over a `Backend`."""

    def __init__(self, backend: Backend, *, settings: CriticSettings | None = None) -> None:
        """Train `backend`, made by `critic_backend` with the same settings. At first every value is 0."""
        self.backend = backend
        self.settings = settings or CriticSettings()

    def score(self, samples: Sequence[TrainSample]) -> list[Floats]:
        """Return for each sample [T] the value of the state in which each weighted token is sampled, 0 elsewhere."""
        return self.backend.score([bare(s) for s in samples])

    def forward_backward(self, samples: Sequence[TrainSample], *, coefs: Sequence[ArrayLike] | None = None) -> Metrics:
        """Add the gradient of the value loss over `samples`, the samples of one optimizer step.

        If the loss is not finite, `optim_step` skips the step or ends the run.

        Args:
            samples: Samples with `values` and `returns`; a token whose return is NaN is not trained.
            coefs: For each sample [T]; None computes them over `samples` by `value_coefs`.

        Raises:
            TrainingError: the samples have no values or returns.
        """
        start = time.perf_counter()
        # Over the whole step, before it is divided over ranks and micro-batches: a mean of their means would differ.
        coefs = value_coefs(samples) if coefs is None else coefs
        result = self.backend.forward_backward([bare(s) for s in samples], coefs, "value")
        metrics: Metrics = {"time/critic_s": Sum(time.perf_counter() - start)}
        return {**_renamed(result.metrics), **metrics} if result.is_finite else metrics

    def optim_step(self) -> Metrics:
        """Take one optimizer step from the summed gradient, and clear it.

        Raises:
            TrainingError: more consecutive steps had a loss or gradient that is not finite than may be skipped.
        """
        return _renamed(self.backend.optim_step())


def local_critic(model: PreTrainedModel, *, settings: CriticSettings | None = None, **options: Any) -> Critic:
    """Return a critic in this process over a copy of `model`'s backbone; `options` go to `critic_backend`."""
    backbone = copy.deepcopy(model.base_model)
    assert isinstance(backbone, PreTrainedModel)
    return Critic(critic_backend(model, backbone=backbone, settings=settings, **options), settings=settings)


def critic_backend(
    model: PreTrainedModel,
    *,
    optim: OptimSettings,
    backbone: PreTrainedModel | None = None,
    settings: CriticSettings | None = None,
    layout: LayoutSettings | None = None,
    media: MediaProcessor | None = None,
    placement: Placement | None = None,
) -> ModelBackend:
    """Return the backend that trains a value function.

    Args:
        model: The language model with the backbone.
        optim: The critic's optimizer and schedule.
        backbone: The backbone to train; None takes the backbone of `model`, and `model` must not be used afterwards.
        settings: The value loss.
        layout: The size of micro-batches.
        media: The model's processor, for samples that show images, videos or sounds; None for text.
        placement: The devices of the parameters; None leaves them where they are.

    Raises:
        ConfigError: the model cannot be split as `placement` asks.
    """
    placement = placement or Placement()
    trained = model.base_model if backbone is None else backbone
    assert isinstance(trained, PreTrainedModel)
    network = placement.values(trained)
    optimizer = placement.optimizer(network, optim)
    fitting, is_refused = fitting_layout(layout or LayoutSettings(), [network], placement)
    return ModelBackend(
        network,
        optimizer=optimizer,
        objectives={"value": ValueTerms(settings or CriticSettings())},
        placement=placement,
        layout=fitting,
        media=None if media is None else MediaRows(model, media),
        is_packing_refused=is_refused,
    )


class ValueTerms(Objective):
    """The value loss with `CriticSettings`."""

    def __init__(self, settings: CriticSettings) -> None:
        self._settings = settings

    def bind(self, samples: Sequence[TrainSample], weights: TermWeights) -> Callable[[ScoringModel, MicroBatch], Terms]:
        """Return a function from the network and a micro-batch of `samples`, which have values and returns, to its terms."""
        starts = np.concatenate([[0], np.cumsum([len(s) for s in samples])]).astype(np.int64)
        returns = np.concatenate([*(_array(s.returns) for s in samples), np.empty(0)])
        old = np.concatenate([*(_array(s.values) for s in samples), np.empty(0)])

        def terms(network: ScoringModel, batch: MicroBatch) -> Terms:
            values_S: Tensor = network(batch)
            if batch.is_padding:  # no sample: this pass only keeps the rank in step
                return Terms(values_S, values_S.detach())
            indices = starts[batch.sample_S] + batch.token_S
            # A token without a return has the coefficient 0, and 0 times NaN would be NaN.
            target_S = torch.from_numpy(np.nan_to_num(returns[indices])).to(values_S, non_blocking=True)
            old_S = torch.from_numpy(old[indices]).to(values_S, non_blocking=True)
            loss_S, is_clipped_S = self._loss(values_S, target_S, old_S)
            return Terms(loss_S, values_S.detach(), parts_S={"critic/clip_fraction": is_clipped_S})

        return terms

    def problem(self, samples: Sequence[TrainSample], batch: MicroBatch, terms: Terms, *, step: int) -> str:
        """Return the error message for a loss that is not finite."""
        return (
            f"the value loss is not finite at optimizer step {step}: look at the rewards and at critic/grad_norm of the "
            "steps before, or lower algorithm.critic.optim.lr"
        )

    def _loss(self, values_S: Tensor, target_S: Tensor, old_S: Tensor) -> tuple[Tensor, Tensor]:
        # PPO's value loss takes the larger of the two, so that clipping never hides an error; see `CriticSettings`.
        plain_S = 0.5 * (values_S - target_S).square()
        if self._settings.clip is None:
            return plain_S, torch.zeros_like(plain_S)
        near_S = old_S + (values_S - old_S).clamp(-self._settings.clip, self._settings.clip)
        clipped_S = 0.5 * (near_S - target_S).square()
        return torch.maximum(plain_S, clipped_S), (clipped_S > plain_S).to(plain_S.dtype).detach()


def value_coefs(samples: Sequence[TrainSample]) -> list[NDArray[np.float64]]:
    """Return for each sample [T] coefficients that average the value loss over the whole batch.

    Raises:
        TrainingError: the samples have no values or returns.
    """
    missing = next((s.id for s in samples if s.returns is None or s.values is None), None)
    if missing is not None:
        raise TrainingError(f"sample {missing} has no values or returns; run an estimator that uses a critic first")
    num_targets = sum(int(_is_target(s).sum()) for s in samples)
    return [_is_target(s) / max(1, num_targets) for s in samples]


def bare(sample: TrainSample) -> TrainSample:
    """Return a sample with only the arrays that a critic reads, to avoid sending and laying out the others."""
    unread = ("advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs", "correction", "marks", "rewards", "versions")
    return sample.replace(**dict.fromkeys(unread))


def value_metrics(samples: Sequence[TrainSample]) -> Metrics:
    """Return the means of values and returns, and the explained variance: 1 - var(returns - values) / var(returns)."""
    pairs = [(_array(s.returns)[_is_target(s)], _array(s.values)[_is_target(s)]) for s in samples if s.returns is not None]
    returns = np.concatenate([*(r for r, _ in pairs), np.empty(0)])
    values = np.concatenate([*(v for _, v in pairs), np.empty(0)])
    if not len(returns):
        return {}
    metrics: Metrics = {
        "critic/value": Mean(float(values.sum()), len(values)),
        "critic/return": Mean(float(returns.sum()), len(returns)),
    }
    if returns.var() > 0:  # equal returns have no variance to explain
        metrics["critic/explained_variance"] = Mean(float(1 - (returns - values).var() / returns.var()))
    return metrics


def _renamed(metrics: Metrics) -> Metrics:
    return {_NAMES[name]: value for name, value in metrics.items() if name in _NAMES}


def _is_target(sample: TrainSample) -> NDArray[np.bool_]:
    assert sample.returns is not None
    is_target: NDArray[np.bool_] = (sample.loss_weights != 0) & ~np.isnan(sample.returns)
    return is_target


def _array(values: Floats | None) -> NDArray[np.float64]:
    assert values is not None
    return values.astype(np.float64)
