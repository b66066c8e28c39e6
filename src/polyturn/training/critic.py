"""Critic: the model's backbone with one number per position, trained to say what is still to come.

    sample      ids      [ p0 p1 a2 a3 o4 a5 o6 ]      values at the weighted tokens [ . . v2 v3 . v5 . ]
    row         input    [ p0 p1 a2 a3 o4 ]            v2 is read off column 1, where a2 is about to be sampled

Index t describes token t: v_t is the value of the state that token t is sampled in, read at the position that predicts it,
through the same `layout` that shifts targets. Values exist at weighted tokens only, so observations have no part in them.
Over many ranks it is sharded as the policy is (`critic_shards`).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from polyturn.batching.layout import LayoutSettings, MicroBatch, layout, scatter_back
from polyturn.core.arrays import Floats
from polyturn.core.errors import CheckpointError, ConfigError, TrainingError
from polyturn.core.metrics import Mean, Metrics, Sum
from polyturn.core.sample import TrainSample
from polyturn.tokens.multimodal import MediaProcessor
from polyturn.tokens.positions import MediaRows
from polyturn.training.modality_encoders import touching
from polyturn.training.optim import Optimizer, OptimSettings, clone_tensors

_NAMES = {"loss/lr": "critic/lr", "loss/grad_norm": "critic/grad_norm", "loss/skipped_steps": "critic/skipped_steps"}
"""What the optimizer calls its metrics -> what they are called here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings:
    """The value loss: mean over targets of max((v - G)^2, (clip(v, v_old - clip, v_old + clip) - G)^2) / 2.

    Source: Schulman et al. 2017 (PPO), in the form of its implementation; without `clip` it is (v - G)^2 / 2.
    """

    clip: float | None = 0.2
    """How far a value may move from the one before the step and still be drawn to its target; None does not clip."""
    warmup: int = 0
    """Steps in which only the critic is trained, so that the policy does not follow a critic that knows nothing."""

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"the critic's clip is {self.clip}; it must be above 0, or None")


class ValueFunction(Protocol):
    """What an update asks of a critic: this process's own, or that of a whole team."""

    settings: CriticSettings

    def score(self, samples: Sequence[TrainSample]) -> list[Floats]:
        """Return for each sample [T] the value of the state that each weighted token is sampled in, 0 elsewhere."""
        ...

    def forward_backward(self, samples: Sequence[TrainSample]) -> Metrics:
        """Add the gradient of the value loss over `samples`, everything that one optimizer step trains on."""
        ...

    def optim_step(self) -> Metrics:
        """Take one optimizer step from the summed gradient, and clear it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters and the optimizer."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        ...


class Critic:
    """Owns the parameters and the optimizer of a value function."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        optim: OptimSettings,
        settings: CriticSettings | None = None,
        layout: LayoutSettings | None = None,
        media: MediaProcessor | None = None,
    ) -> None:
        """Start from a copy of `model`'s backbone; at first every value is 0.

        Args:
            model: Where the backbone comes from, usually the policy as it is now; it is not changed.
            optim: The critic's own optimizer and schedule.
            settings: The value loss.
            layout: The size of micro-batches.
            media: The model's processor, for samples that show images, videos or sounds; None for text.
        """
        self.settings = settings or CriticSettings()
        self._media = None if media is None else MediaRows(model, media)
        self.model, self.optimizer = self._prepare(model, optim)
        self._layout = layout or LayoutSettings()
        self._device = next(self.model.parameters()).device

    def score(self, samples: Sequence[TrainSample]) -> list[Floats]:
        """Return for each sample [T] the value of the state that each weighted token is sampled in, 0 elsewhere."""
        batches = self._lay_out(samples, [s.loss_weights for s in samples])
        self.model.eval()
        try:
            with torch.no_grad():
                values = [self.model(batch) for batch in batches]
        finally:
            self.model.train()
        return scatter_back(batches, values, lengths=[len(s) for s in samples])

    def forward_backward(self, samples: Sequence[TrainSample], *, coefs: Sequence[ArrayLike] | None = None) -> Metrics:
        """Add the gradient of the value loss over `samples`, everything that one optimizer step trains on.

        A loss that is not finite makes the step one that `optim_step` skips, or ends the run at.

        Args:
            samples: With `values` and `returns`; a token whose return is NaN is not trained.
            coefs: For each sample [T]; None computes them over `samples` by `value_coefs`.

        Raises:
            TrainingError: the samples lack them.
        """
        start = time.perf_counter()
        batches = self._lay_out(samples, value_coefs(samples) if coefs is None else coefs)
        starts = np.concatenate([[0], np.cumsum([len(s) for s in samples])]).astype(np.int64)
        returns = np.concatenate([*(_array(s.returns) for s in samples), np.empty(0)])
        old = np.concatenate([*(_array(s.values) for s in samples), np.empty(0)])
        loss_sum = clipped_sum = 0.0
        problem: str | None = None
        for batch in batches:
            if batch.is_padding:  # keeps step with the other ranks
                (self.model(batch) * batch.loss_coef_S).sum().backward()
                self.optimizer.collect()
                continue
            places = starts[batch.sample_S] + batch.token_S
            values_S = self.model(batch)
            target_S = torch.from_numpy(np.nan_to_num(returns[places])).to(values_S)
            loss_S, is_clipped_S = self._loss(values_S, target_S, torch.from_numpy(old[places]).to(values_S))
            loss = (loss_S * batch.loss_coef_S.to(values_S)).sum()
            if problem is None and not math.isfinite(float(loss.detach())):
                problem = (
                    f"the value loss is not finite at optimizer step {self.optimizer.step_count}: look at the rewards and "
                    "at critic/grad_norm of the steps before, or lower algorithm.critic.optim.lr"
                )
            loss.backward()
            self.optimizer.collect()
            loss_sum += float(loss.detach())
            clipped_sum += float((is_clipped_S * batch.loss_coef_S).sum())
        metrics: Metrics = {"time/critic_s": Sum(time.perf_counter() - start)}
        if problem is not None:
            self.optimizer.spoil(problem)
            return metrics
        return {"critic/value_loss": Mean(loss_sum), "critic/clip_fraction": Mean(clipped_sum), **metrics}

    def optim_step(self) -> Metrics:
        """Take one optimizer step from the summed gradient, and clear it.

        Raises:
            TrainingError: loss or gradient is not finite, once more in a row than such steps are skipped.
        """
        return {_NAMES[name]: value for name, value in self.optimizer.step().items() if name in _NAMES}

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the parameters and the optimizer."""
        return {"model": clone_tensors(self.model.state_dict()), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            CheckpointError: the state is of another model.
        """
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as problem:
            raise CheckpointError(f"the checkpoint's critic does not fit this model: {problem}") from problem
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.zero_grad()

    def _prepare(self, model: PreTrainedModel, optim: OptimSettings) -> tuple[ValueModel, Optimizer]:
        """Return the value function and its optimizer."""
        value_model = ValueModel(model, copy.deepcopy(model.base_model))
        return value_model, Optimizer(value_model, optim)

    def _loss(self, values_S: Tensor, target_S: Tensor, old_S: Tensor) -> tuple[Tensor, Tensor]:
        plain_S = 0.5 * (values_S - target_S).square()
        if self.settings.clip is None:
            return plain_S, torch.zeros_like(plain_S)
        near_S = old_S + (values_S - old_S).clamp(-self.settings.clip, self.settings.clip)
        clipped_S = 0.5 * (near_S - target_S).square()
        return torch.maximum(plain_S, clipped_S), (clipped_S > plain_S).to(plain_S.dtype).detach()

    def _lay_out(self, samples: Sequence[TrainSample], coefs: Sequence[ArrayLike]) -> list[MicroBatch]:
        return layout([bare(s) for s in samples], coefs=coefs, settings=self._layout, device=self._device, media=self._media)


class ValueModel(nn.Module):
    """A backbone and a linear map from its last hidden state to one number, 0 at first."""

    def __init__(self, model: PreTrainedModel, backbone: nn.Module) -> None:
        """Put a head on `backbone`, which is, or is like, that of `model`."""
        super().__init__()
        config = model.config.get_text_config()
        like = next(model.parameters())
        self.backbone = backbone
        self.towers: tuple[nn.Module, ...] = ()
        """What only some ranks would run; see `towers.py`."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.head = nn.Linear(int(config.hidden_size), 1).to(device=like.device, dtype=dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Return [S] the value at each target of `batch`."""
        dtype = next(self.backbone.parameters()).dtype
        inputs = {name: v.to(dtype) if v.is_floating_point() else v for name, v in batch.media_inputs.items()}
        hidden_BTH = self.backbone(
            input_ids=batch.input_ids_BT, position_ids=batch.position_ids, use_cache=False, **inputs
        ).last_hidden_state
        read_SH = hidden_BTH.flatten(0, 1).index_select(0, batch.flat_S)
        values_S1: Tensor = self.head(read_SH.to(self.head.weight.dtype))
        # The hook of a sharded module's backward pass must not sit on a view, hence the copy.
        return touching(values_S1[:, 0].clone(), self.towers)


def first_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state of a value model over the backbone of `model`, as live tensors, before it has learnt anything."""
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    head = {"head.weight": torch.zeros(1, int(model.config.get_text_config().hidden_size), dtype=dtype)}
    backbone = {f"backbone.{name}": tensor for name, tensor in model.base_model.state_dict().items()}
    return {**backbone, **head, "head.bias": torch.zeros(1, dtype=dtype)}


def value_coefs(samples: Sequence[TrainSample]) -> list[NDArray[np.float64]]:
    """Return for each sample [T] what its value losses are multiplied by: their mean over the whole batch.

    Raises:
        TrainingError: the samples have no values or returns.
    """
    missing = next((s.id for s in samples if s.returns is None or s.values is None), None)
    if missing is not None:
        raise TrainingError(f"sample {missing} has no values or returns; run an estimator that uses a critic first")
    num_targets = sum(int(_is_target(s).sum()) for s in samples)
    return [_is_target(s) / max(1, num_targets) for s in samples]


def bare(sample: TrainSample) -> TrainSample:
    """Return a sample with what a critic needs."""
    unread = ("advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs", "correction", "marks", "rewards", "versions")
    return sample.replace(**dict.fromkeys(unread))


def value_metrics(samples: Sequence[TrainSample]) -> Metrics:
    """Return how well the values before a step foretold its returns: 1 - var(returns - values) / var(returns)."""
    pairs = [(_array(s.returns)[_is_target(s)], _array(s.values)[_is_target(s)]) for s in samples if s.returns is not None]
    returns = np.concatenate([*(r for r, _ in pairs), np.empty(0)])
    values = np.concatenate([*(v for _, v in pairs), np.empty(0)])
    if not len(returns):
        return {}
    metrics: Metrics = {
        "critic/value": Mean(float(values.sum()), len(values)),
        "critic/return": Mean(float(returns.sum()), len(returns)),
    }
    if returns.var() > 0:
        metrics["critic/explained_variance"] = Mean(float(1 - (returns - values).var() / returns.var()))
    return metrics


def _is_target(sample: TrainSample) -> NDArray[np.bool_]:
    assert sample.returns is not None
    is_target: NDArray[np.bool_] = (sample.loss_weights != 0) & ~np.isnan(sample.returns)
    return is_target


def _array(values: Floats | None) -> NDArray[np.float64]:
    assert values is not None
    return values.astype(np.float64)
