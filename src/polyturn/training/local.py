"""LocalPolicy: the trainer's side of the model in this process, with every parameter on one device.

    samples (one optimizer step) -> loss_coefs -> layout -> for each micro-batch: forward, loss terms, backward
    optim_step: clip, AdamW, clear

One call of `forward_backward` takes everything that one optimizer step trains on: the coefficients are normalised over
that batch, and the gradients of its micro-batches add up to exactly its gradient (I7).
"""

from __future__ import annotations

import dataclasses
import logging
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
from polyturn.algorithms.kl import FixedKl, KlController
from polyturn.algorithms.losses import mark, selection_of
from polyturn.batching.layout import LayoutSettings, MicroBatch, layout, scatter_back
from polyturn.core.arrays import Floats
from polyturn.core.errors import CheckpointError, ConfigError, TrainingError
from polyturn.core.metrics import Metrics, Sum, merge
from polyturn.core.sample import TrainSample
from polyturn.tokens.multimodal import MediaProcessor
from polyturn.tokens.positions import MediaRows
from polyturn.training.agreement import agreement
from polyturn.training.forward import TargetForward, TargetScores
from polyturn.training.lora import adapter_tensors, base_weights, has_lora, load_adapter_tensors, merged_weights
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
from polyturn.training.packed_attention import attending, why_not_packed
from polyturn.training.reference import FrozenModel, Scorer, make_reference, require_same_vocabulary

logger = logging.getLogger(__name__)


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
        reference: bool | PreTrainedModel = False,
        teacher: PreTrainedModel | None = None,
        kl: KlController | None = None,
        media: MediaProcessor | None = None,
    ) -> None:
        """Wrap `model`.

        Args:
            model: On its device, in its dtype.
            optim: The optimizer and its schedule.
            loss: The policy loss; None takes the defaults.
            layout: The size of micro-batches and how samples lie in them; where a model cannot be packed they lie in rows.
            reference: Keep the model as it is now (a frozen copy; with LoRA its adapter alone), or another model, for the KL
                term and `score(…, reference=True)`.
            teacher: The model to distil from.
            kl: Steers the weight of the KL term; None keeps it at `loss.kl_coef`.
            media: The model's processor, for samples that show images, videos or sounds; None for text.

        Raises:
            ConfigError: a KL term without a reference, a distillation term without a teacher, or one of another vocabulary.
        """
        self.loss_settings = loss or LossSettings()
        self.model = model.train()
        others = [m for m in (reference, teacher) if isinstance(m, PreTrainedModel)]
        self._layout, self._is_refused = _that_fits(layout or LayoutSettings(), [model, *others])
        self._forward, self._reference, self.optimizer = self._prepare(model, optim, reference)
        if teacher is not None:
            require_same_vocabulary(model, teacher, name="teacher")
        self._teacher = None if teacher is None else self._frozen(teacher)
        self.kl = kl or FixedKl(coef=self.loss_settings.kl_coef)
        self._policy_terms = PolicyTerms(
            self.loss_settings,
            reference=None if self._reference is None else self._score_reference,
            teacher=None if self._teacher is None else self._teacher.logprobs,
            kl=self.kl,
        )
        self._media = None if media is None else MediaRows(model, media)
        parameter = next(model.parameters())
        self._device = parameter.device
        self._dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.train_seconds = 0.0
        """Seconds spent in forward and backward so far, `score` included."""
        self.optim_seconds = 0.0
        """Seconds spent in optimizer steps so far."""
        self.last_logprobs: list[Floats] | None = None
        """For each sample of the latest `forward_backward` [T] its log-probabilities under this policy, for the records."""

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
        logprobs = self._score_reference if reference else self._logprobs
        if reference:
            self._reference_policy()
        batches = self._lay_out(samples, [s.loss_weights for s in samples])
        self.model.eval()
        try:
            with torch.no_grad():
                values = [logprobs(batch) for batch in batches]
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
            TrainingError: the samples lack what the loss needs. The gradient is cleared. A loss that is not finite makes the
                step one that `optim_step` skips, or ends the run at.
        """
        settings = self.loss_settings
        samples = with_marks(samples, settings, score=self.score, seed=self.step_count)
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

        A loss that is not finite makes the step one that `optim_step` skips, or ends the run at.
        """
        if coefs is None:
            coefs = loss_coefs(samples, mode="token-mean")
        return self._accumulate(samples, coefs, sft_terms, entropy_grad=None)

    def optim_step(self) -> Metrics:
        """Take one optimizer step from the summed gradient, and clear it.

        Raises:
            TrainingError: loss or gradient is not finite, once more in a row than such steps are skipped.
        """
        start = time.perf_counter()
        metrics = self.optimizer.step()
        seconds = time.perf_counter() - start
        self.optim_seconds += seconds
        metrics["time/optim"] = Sum(seconds)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the parameters (with LoRA those of the adapter), the optimizer and, where it belongs to no file,
        the reference."""
        is_adapted = has_lora(self.model)
        model = adapter_tensors(self.model) if is_adapted else self.model.state_dict()
        state = {"model": clone_tensors(model), "optimizer": self.optimizer.state_dict(), "kl": self.kl.state_dict()}
        reference = None if self._reference is None else self._reference.state_dict()
        return state if reference is None else {**state, "reference": reference}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, writing every tensor in place.

        Raises:
            CheckpointError: the state is of another model, or lacks the reference.
        """
        needs_reference = self._reference is not None and self._reference.state_dict() is not None
        if needs_reference and "reference" not in state:
            raise CheckpointError("the checkpoint has no reference policy and this run uses one; it was written without KL")
        if has_lora(self.model):
            load_adapter_tensors(self.model, state["model"])
        else:
            try:
                self.model.load_state_dict(state["model"])
            except RuntimeError as problem:
                raise CheckpointError(f"the checkpoint does not fit this model: {problem}") from problem
        if self._reference is not None and needs_reference:
            self._reference.load_state_dict(state["reference"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.kl.load_state_dict(state.get("kl", {}))
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        """Return name -> weight without gradient, for an engine: live tensors, and merged where an adapter changes them."""
        return merged_weights(self.model) if has_lora(self.model) else self.live_weights()

    def live_weights(self) -> dict[str, Tensor]:
        """Return name -> the live tensor that each of `weights` is, or is made of."""
        return base_weights(self.model)

    def close(self) -> None:
        """Free the gradient and the reference."""
        self.optimizer.zero_grad()
        self._reference = self._teacher = None

    def _prepare(
        self, model: PreTrainedModel, optim: OptimSettings, reference: bool | PreTrainedModel
    ) -> tuple[TargetForward, Scorer | None, Optimizer]:
        """Return the forward pass, the reference and the optimizer, in the order in which they must see the model."""
        forward = TargetForward(model)
        return forward, make_reference(model, forward, reference), Optimizer(model, optim)

    def _frozen(self, teacher: PreTrainedModel) -> Scorer:
        """Return what scores with the teacher."""
        return FrozenModel(teacher, is_kept=False)

    def _reference_policy(self) -> Scorer:
        if self._reference is None:
            raise ConfigError("this policy was built without a reference; pass reference=True")
        return self._reference

    def _score_reference(self, batch: MicroBatch) -> Tensor:
        return self._reference_policy().logprobs(batch)

    def _logprobs(self, batch: MicroBatch) -> Tensor:
        return self._forward(batch).logprobs_S

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
        real = [b for b in batches if not b.is_padding]
        parts: list[Metrics] = []
        own: list[Tensor] = []
        self.model.train()
        problem: str | None = None
        try:
            for batch in batches:
                start = time.perf_counter()
                with attending(self.model, batch.packing):  # around both, for layers that backward computes again
                    scores = self._forward(batch, entropy_grad=entropy_grad)
                    terms = terms_of(batch, scores)
                    loss = (terms.loss_S * batch.loss_coef_S).sum()
                    value = float(loss.detach())
                    if not batch.is_padding:
                        parts.append(batch_metrics(batch, scores, terms, value))
                    if problem is None and not batch.is_padding and not math.isfinite(value):
                        problem = non_finite_message(samples, batch, scores, terms, step=self.step_count)
                    if terms.own_S is not None and not batch.is_padding:
                        own.append(terms.own_S)
                    start = clock.add("time/forward", start)
                    loss.backward()
                self.optimizer.collect()
                clock.add("time/backward", start)
        except TrainingError:
            self.optimizer.zero_grad()
            raise
        times: Metrics = {name: Sum(seconds) for name, seconds in clock.seconds.items()}
        spent = clock.seconds.get("time/forward", 0.0) + clock.seconds.get("time/backward", 0.0)
        times["time/forward_backward"] = Sum(spent)
        times["tokens/shared_prefix"] = Sum(sum(b.num_shared for b in real))
        if self._is_refused:
            times["tokens/packing_refused"] = Sum(1)
        self.train_seconds += spent
        self.last_logprobs = scatter_back(real, own, lengths=[len(s) for s in samples]) if own else None
        if problem is not None:
            self.optimizer.spoil(problem)
            return {name: m for name, m in as_step(merge(parts)).items() if math.isfinite(m.value)} | times
        if self.last_logprobs is not None:
            times |= agreement(samples, self.last_logprobs)
        return as_step(merge(parts)) | times


def with_marks(
    samples: Sequence[TrainSample],
    settings: LossSettings,
    *,
    score: Callable[[Sequence[TrainSample]], list[Floats]],
    seed: int,
) -> Sequence[TrainSample]:
    """Let the policy loss choose the tokens of a whole step that it treats apart, where it does and nobody has yet.

    Args:
        samples: Everything that one optimizer step trains on, of all ranks.
        settings: The loss.
        score: Gives log-probabilities under the policy now, where the samples bring no old ones.
        seed: Of the choice.
    """
    selection = selection_of(settings.policy_loss, kwargs=settings.policy_loss_kwargs)
    if selection is None or all(s.marks is not None for s in samples):
        return samples
    scored = list(samples)
    if any(s.old_logprobs is None for s in samples):
        scored = [s.replace(old_logprobs=lp) for s, lp in zip(samples, score(samples), strict=True)]
    marks = mark(scored, selection, seed=seed)
    return [s.replace(marks=m) for s, m in zip(samples, marks, strict=True)]


def _that_fits(settings: LayoutSettings, models: Sequence[PreTrainedModel]) -> tuple[LayoutSettings, bool]:
    """Return the settings without packing, and True, where one of the models cannot be packed."""
    if settings.packed or settings.shared_prefix:
        for model in models:
            if (why := why_not_packed(model)) is not None:
                logger.warning(
                    "Samples lie in padded rows and every common prefix is computed again: %s cannot be packed, because %s",
                    type(model).__name__,
                    why,
                )
                return dataclasses.replace(settings, packed=False, shared_prefix=False), True
    return settings, False
