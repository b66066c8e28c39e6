"""LocalPolicy: the trainer's side of the model in this process, with every parameter on one device.

    samples (one optimizer step) -> loss_coefs -> layout -> for each micro-batch: forward, loss terms, backward
    optim_step: clip, AdamW, clear

One call of `forward_backward` takes everything that one optimizer step trains on: the coefficients are normalised over
that batch, and the gradients of its micro-batches add up to exactly its gradient (I7).
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor
from transformers import PreTrainedModel

from polyturn.algorithms.aggregate import loss_coefs
from polyturn.batching.layout import LayoutSettings, MicroBatch, layout, scatter_back
from polyturn.core.arrays import Floats
from polyturn.core.errors import CheckpointError, ConfigError, TrainingError
from polyturn.core.metrics import Metrics, Sum, merge
from polyturn.core.sample import TrainSample
from polyturn.tokens.multimodal import MediaProcessor
from polyturn.tokens.positions import MediaRows
from polyturn.training.agreement import agreement
from polyturn.training.forward import TargetForward, TargetScores
from polyturn.training.loss_terms import (
    LossSettings,
    PolicyTerms,
    Terms,
    as_step,
    batch_metrics,
    non_finite_message,
    sft_terms,
)
from polyturn.training.optim import Optimizer, OptimSettings, clone_tensors

MAX_LOGITS = 2**27
"""Default bound on targets times vocabulary in one micro-batch: 512 MiB of float32 logits, held about three times over."""
MAX_LOGITS_CPU = 2**22
"""The same on a CPU, where the first touch of fresh pages costs as much as the logits themselves: 16 MiB."""


@dataclass(slots=True)
class _Clock:
    """Seconds spent, by part."""

    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, since: float) -> float:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - since
        return now


class LocalPolicy:
    """Owns a model's parameters, gradients and optimizer; implements `core.protocols.Policy`.

    The model is used as it is, not copied, and its parameters are only ever written in place: an engine may share them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        optim: OptimSettings,
        loss: LossSettings | None = None,
        layout: LayoutSettings | None = None,
        reference: bool = False,
        media: MediaProcessor | None = None,
    ) -> None:
        """Wrap `model`.

        Args:
            model: On its device, in its dtype.
            optim: The optimizer and its schedule.
            loss: The policy loss; None takes the defaults.
            layout: The size of micro-batches; without a bound on targets, one is set from the vocabulary (`MAX_LOGITS`,
                `MAX_LOGITS_CPU`).
            reference: Keep a frozen copy of the model as it is now, for the KL term and `score(…, reference=True)`.
            media: The model's processor, for samples that show images, videos or sounds; None for text.

        Raises:
            ConfigError: a KL term without a reference.
        """
        self.loss_settings = loss or LossSettings()
        self._policy_terms = PolicyTerms(self.loss_settings, reference=self._score_reference if reference else None)
        self.model = model.train()
        self.optimizer = Optimizer(model, optim)
        self._forward = TargetForward(model)
        self._reference: PreTrainedModel | None = None
        self._reference_forward: TargetForward | None = None
        if reference:
            self._reference = copy.deepcopy(model).requires_grad_(False).eval()
            self._reference_forward = TargetForward(self._reference)
        self._media = None if media is None else MediaRows(model, media)
        self._layout = layout or LayoutSettings()
        parameter = next(model.parameters())
        self._device = parameter.device
        if self._layout.max_targets_per_batch is None:
            vocab = model.config.get_text_config().vocab_size
            limit = MAX_LOGITS_CPU if self._device.type == "cpu" else MAX_LOGITS
            self._layout = dataclasses.replace(self._layout, max_targets_per_batch=max(1, limit // vocab))
        self._dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.train_seconds = 0.0
        """Seconds spent in forward and backward so far, `score` included."""
        self.optim_seconds = 0.0
        """Seconds spent in optimizer steps so far."""

    @property
    def step_count(self) -> int:
        """How many optimizer steps were taken or skipped."""
        return self.optimizer.step_count

    def score(self, samples: Sequence[TrainSample], *, reference: bool = False) -> list[Floats]:
        """Return for each sample [T] the log-probability of each weighted token, 0 elsewhere.

        Raises:
            ConfigError: `reference` is asked of a policy that was built without one.
        """
        start = time.perf_counter()
        forward = self._reference_policy() if reference else self._forward
        batches = self._lay_out(samples, [s.loss_weights for s in samples])
        self.model.eval()
        try:
            with torch.no_grad():
                values = [forward(batch).logprobs_S for batch in batches]
        finally:
            self.model.train()
        scores = scatter_back(batches, values, lengths=[len(s) for s in samples])
        self.train_seconds += time.perf_counter() - start
        return scores

    def forward_backward(self, samples: Sequence[TrainSample], *, coefs: Sequence[ArrayLike] | None = None) -> Metrics:
        """Add the gradient of the policy loss over `samples`, everything that one optimizer step trains on.

        Args:
            samples: With `advantages`; with old_logprobs or rollout_logprobs as `LossSettings.old_logprobs` says. Missing
                ref_logprobs are computed here when the loss has a KL term.
            coefs: For each sample [T]; None computes them over `samples` by `LossSettings.aggregation`.

        Raises:
            TrainingError: the loss is not finite, or the samples lack what the loss needs. The gradient is cleared.
        """
        settings = self.loss_settings
        if coefs is None:
            coefs = loss_coefs(
                samples,
                mode=settings.aggregation,
                norm_length=settings.norm_length,
                segment_weight=settings.segment_weight,
            )
        entropy_grad = settings.entropy_coef != 0
        return self._accumulate(samples, coefs, self._policy_terms, entropy_grad=entropy_grad)

    def sft_forward_backward(self, samples: Sequence[TrainSample], *, coefs: Sequence[ArrayLike] | None = None) -> Metrics:
        """Add the gradient of the weighted cross-entropy over `samples`, averaged over the weight of the whole batch.

        Raises:
            TrainingError: the loss is not finite. The gradient is cleared.
        """
        if coefs is None:
            coefs = loss_coefs(samples, mode="token-mean")
        return self._accumulate(samples, coefs, sft_terms, entropy_grad=None)

    def optim_step(self) -> Metrics:
        """Take one optimizer step from the summed gradient, and clear it.

        Raises:
            TrainingError: the gradient is not finite, and such steps are not to be skipped.
        """
        start = time.perf_counter()
        metrics = self.optimizer.step()
        seconds = time.perf_counter() - start
        self.optim_seconds += seconds
        metrics["time/optim"] = Sum(seconds)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the parameters, the optimizer and, if there is one, the reference."""
        state = {"model": clone_tensors(self.model.state_dict()), "optimizer": self.optimizer.state_dict()}
        if self._reference is not None:
            state["reference"] = clone_tensors(self._reference.state_dict())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, writing every tensor in place.

        Raises:
            CheckpointError: the state is of another model, or lacks the reference.
        """
        if self._reference is not None and "reference" not in state:
            raise CheckpointError("the checkpoint has no reference policy and this run uses one; it was written without KL")
        try:
            self.model.load_state_dict(state["model"])
            if self._reference is not None:
                self._reference.load_state_dict(state["reference"])
        except RuntimeError as problem:
            raise CheckpointError(f"the checkpoint does not fit this model: {problem}") from problem
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        """Return name -> parameter, the live tensors without gradient, for an engine."""
        return {name: value.detach() for name, value in self.model.state_dict().items()}

    def close(self) -> None:
        """Free the gradient and the reference."""
        self.optimizer.zero_grad()
        self._reference = self._reference_forward = None

    def _reference_policy(self) -> TargetForward:
        if self._reference_forward is None:
            raise ConfigError("this policy was built without a reference; pass reference=True")
        return self._reference_forward

    def _score_reference(self, batch: MicroBatch) -> Tensor:
        return self._reference_policy()(batch).logprobs_S

    def _lay_out(self, samples: Sequence[TrainSample], coefs: Sequence[ArrayLike]) -> list[MicroBatch]:
        return layout(samples, coefs=coefs, settings=self._layout, dtype=self._dtype, device=self._device, media=self._media)

    def _accumulate(
        self,
        samples: Sequence[TrainSample],
        coefs: Sequence[ArrayLike],
        terms_of: Callable[[MicroBatch, TargetScores], Terms],
        *,
        entropy_grad: bool | None,
    ) -> Metrics:
        clock = _Clock()
        start = time.perf_counter()
        batches = self._lay_out(samples, coefs)
        clock.add("time/layout", start)
        parts: list[Metrics] = []
        own: list[Tensor] = []
        self.model.train()
        try:
            for batch in batches:
                start = time.perf_counter()
                scores = self._forward(batch, entropy_grad=entropy_grad)
                terms = terms_of(batch, scores)
                loss = (terms.loss_S * batch.loss_coef_S).sum()
                parts.append(batch_metrics(batch, scores, terms, float(loss.detach())))
                if not math.isfinite(parts[-1]["loss/total"].value):
                    raise TrainingError(non_finite_message(samples, batch, scores, terms, step=self.step_count))
                if terms.own_S is not None:
                    own.append(terms.own_S)
                start = clock.add("time/forward", start)
                loss.backward()
                clock.add("time/backward", start)
        except TrainingError:
            self.optimizer.zero_grad()
            raise
        times: Metrics = {name: Sum(seconds) for name, seconds in clock.seconds.items()}
        spent = clock.seconds.get("time/forward", 0.0) + clock.seconds.get("time/backward", 0.0)
        times["time/forward_backward"] = Sum(spent)
        self.train_seconds += spent
        if own:
            times |= agreement(samples, scatter_back(batches, own, lengths=[len(s) for s in samples]))
        return as_step(merge(parts)) | times
