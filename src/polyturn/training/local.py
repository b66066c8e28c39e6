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
from typing import Any, Literal, NamedTuple

import torch
from numpy.typing import ArrayLike
from torch import Tensor
from transformers import PreTrainedModel

from polyturn.algorithms.aggregate import MODES, SEGMENT_WEIGHTS, loss_coefs
from polyturn.algorithms.kl import kl_estimators
from polyturn.algorithms.losses import PolicyLoss, bind, ppo_clip
from polyturn.batching.layout import LayoutSettings, MicroBatch, layout, scatter_back
from polyturn.core.arrays import Floats
from polyturn.core.errors import CheckpointError, ConfigError, TrainingError, UnknownNameError, did_you_mean
from polyturn.core.metrics import Max, Mean, Metrics, Sum, merge
from polyturn.core.sample import TrainSample
from polyturn.tokens.multimodal import MediaProcessor
from polyturn.tokens.positions import MediaRows
from polyturn.training.agreement import agreement
from polyturn.training.forward import TargetForward, TargetScores
from polyturn.training.optim import Optimizer, OptimSettings, clone_tensors

MAX_LOGITS = 2**27
"""Default bound on targets times vocabulary in one micro-batch: 512 MiB of float32 logits, held about three times over."""
MAX_LOGITS_CPU = 2**22
"""The same on a CPU, where the first touch of fresh pages costs as much as the logits themselves: 16 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The loss: sum over tokens of coef * (policy_loss + kl_coef * kl - entropy_coef * entropy)."""

    policy_loss: PolicyLoss = ppo_clip
    """What a token contributes; it is offered the clips below, by their names."""
    policy_loss_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Options of its own."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    aggregation: str = "token-mean"
    """One of `algorithms.aggregate.MODES`."""
    segment_weight: str = "per_token"
    """One of `algorithms.aggregate.SEGMENT_WEIGHTS`."""
    norm_length: float | None = None
    """The constant of seq-mean-token-sum-norm; None takes the longest trajectory of the batch."""
    kl_coef: float = 0.0
    """Above 0 the loss holds the policy near the reference."""
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    old_logprobs: Literal["sample", "rollout"] = "sample"
    """The denominator of the ratio. "sample": the samples' old_logprobs; where the whole batch has none it is on-policy by
    definition, the ratio is 1 and only its gradient counts, which is right for exactly one update on fresh rollouts.
    "rollout": the engine's own logprobs, which saves a forward pass where engine and trainer agree."""

    def __post_init__(self) -> None:
        if self.aggregation not in MODES:
            raise UnknownNameError(
                f"there is no aggregation mode {self.aggregation!r}.{did_you_mean(self.aggregation, MODES)}"
            )
        if self.segment_weight not in SEGMENT_WEIGHTS:
            raise UnknownNameError(
                f"there is no segment weight {self.segment_weight!r}.{did_you_mean(self.segment_weight, SEGMENT_WEIGHTS)}"
            )
        if self.old_logprobs not in ("sample", "rollout"):
            raise ConfigError(f"loss.old_logprobs is {self.old_logprobs!r}; it must be 'sample' or 'rollout'")
        if not 0 <= self.clip_low <= 1 or not self.clip_high >= 0:
            raise ConfigError(
                f"the clip range is [1 - {self.clip_low}, 1 + {self.clip_high}]; it must hold 1 and stay above 0"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"dual_clip is {self.dual_clip}; it must be above 1, or None")
        kl_estimators.resolve(self.kl_estimator)


class _Terms(NamedTuple):
    """What a loss says about the targets of one micro-batch."""

    loss_S: Tensor
    stats_S: dict[str, Tensor]
    """Detached figures per target, averaged over the targets of the step under their names."""
    parts_S: dict[str, Tensor]
    """Detached addends of `loss_S`, summed with the coefficients under their names."""
    own_S: Tensor | None = None
    """Detached log-probabilities under the weights that the step began with, where the engine's are there to compare."""


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
        if self.loss_settings.kl_coef and not reference:
            raise ConfigError(
                f"kl_coef is {self.loss_settings.kl_coef} and there is no reference policy; pass reference=True"
            )
        settings = self.loss_settings
        clips = {"clip_low": settings.clip_low, "clip_high": settings.clip_high, "dual_clip": settings.dual_clip}
        self._policy_loss = bind(settings.policy_loss, offered=clips, kwargs=settings.policy_loss_kwargs)
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
        return self._accumulate(samples, coefs, _sft_terms, entropy_grad=None)

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

    def _lay_out(self, samples: Sequence[TrainSample], coefs: Sequence[ArrayLike]) -> list[MicroBatch]:
        return layout(samples, coefs=coefs, settings=self._layout, dtype=self._dtype, device=self._device, media=self._media)

    def _accumulate(
        self,
        samples: Sequence[TrainSample],
        coefs: Sequence[ArrayLike],
        terms_of: Callable[[MicroBatch, TargetScores], _Terms],
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
                parts.append(_batch_metrics(batch, scores, terms, float(loss.detach())))
                if not math.isfinite(parts[-1]["loss/total"].value):
                    raise TrainingError(self._non_finite_message(samples, batch, scores, terms))
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
        return _as_step(merge(parts)) | times

    def _policy_terms(self, batch: MicroBatch, scores: TargetScores) -> _Terms:
        settings = self.loss_settings
        logprobs_S = scores.logprobs_S
        if batch.advantages_S is None:
            raise TrainingError("the samples have no advantages; run an advantage estimator before forward_backward")
        old_S = self._old_logprobs(batch, logprobs_S)
        policy = self._policy_loss(logprobs_S, old_S, batch.advantages_S, torch.from_numpy(batch.sample_S).to(old_S.device))
        loss_S = policy.loss_T
        parts_S = {"loss/policy": loss_S.detach()}
        stats_S = {f"policy/{name}": value for name, value in policy.stats.items()}
        stats_S["policy/advantage"] = batch.advantages_S
        own_S: Tensor | None = None
        if batch.rollout_logprobs_S is not None:
            # Old ones that are the engine's own would only agree with themselves.
            is_ours = batch.old_logprobs_S is not None and not torch.equal(batch.old_logprobs_S, batch.rollout_logprobs_S)
            own_S = batch.old_logprobs_S if is_ours else logprobs_S.detach()
        if settings.kl_coef:
            ref_S = batch.ref_logprobs_S
            if ref_S is None:
                with torch.no_grad():
                    ref_S = self._reference_policy()(batch).logprobs_S
            kl_S = kl_estimators.resolve(settings.kl_estimator)(logprobs_S, ref_S)
            loss_S = loss_S + settings.kl_coef * kl_S
            parts_S["loss/kl"] = settings.kl_coef * kl_S.detach()
            stats_S["policy/kl_to_reference"] = kl_S.detach()
        if scores.entropy_S is not None:
            stats_S["policy/entropy"] = scores.entropy_S.detach()
            if settings.entropy_coef:
                loss_S = loss_S - settings.entropy_coef * scores.entropy_S
                parts_S["loss/entropy"] = -settings.entropy_coef * scores.entropy_S.detach()
        return _Terms(loss_S, stats_S, parts_S, own_S)

    def _old_logprobs(self, batch: MicroBatch, logprobs_S: Tensor) -> Tensor:
        if self.loss_settings.old_logprobs == "sample":
            return logprobs_S.detach() if batch.old_logprobs_S is None else batch.old_logprobs_S
        if batch.rollout_logprobs_S is None:
            raise TrainingError(
                "loss.old_logprobs is 'rollout' and the engine returned no logprobs; use an engine that returns them, or "
                "'sample' with old_logprobs from Policy.score"
            )
        return batch.rollout_logprobs_S

    def _non_finite_message(
        self, samples: Sequence[TrainSample], batch: MicroBatch, scores: TargetScores, terms: _Terms
    ) -> str:
        """Name the first target whose term is not finite and the numbers it was made of."""
        bad = torch.nonzero(~torch.isfinite(terms.loss_S.detach() * batch.loss_coef_S)).flatten().tolist()
        s = bad[0] if bad else 0
        arrays = {
            "advantage": batch.advantages_S,
            "old_logprob": batch.old_logprobs_S,
            "rollout_logprob": batch.rollout_logprobs_S,
            "ref_logprob": batch.ref_logprobs_S,
        }
        numbers = "".join(f", {name} {float(a[s]):g}" for name, a in arrays.items() if a is not None)
        sample = samples[int(batch.sample_S[s])]
        return (
            f"the loss is not finite at optimizer step {self.step_count}: {len(bad)} of {batch.num_targets} tokens of a "
            f"micro-batch, first token {int(batch.token_S[s])} of sample {'/'.join(map(str, sample.id))} with loss "
            f"{terms.loss_S[s].item():g}, logprob {scores.logprobs_S[s].item():g}{numbers}; if the logprob is not finite "
            "look at the parameters (loss/grad_norm and loss/lr of the steps before), otherwise at where it comes from"
        )


def _sft_terms(batch: MicroBatch, scores: TargetScores) -> _Terms:
    loss_S = -scores.logprobs_S
    return _Terms(loss_S, {}, {"loss/sft": loss_S.detach()})


def _batch_metrics(batch: MicroBatch, scores: TargetScores, terms: _Terms, total: float) -> Metrics:
    """Return the sums of one micro-batch, read from the device in one go."""
    names = [*terms.stats_S, *terms.parts_S]
    values = [v.sum() for v in terms.stats_S.values()]
    values += [(v * batch.loss_coef_S).sum() for v in terms.parts_S.values()]
    numbers = dict(zip(names, torch.stack(values).tolist(), strict=True))
    metrics: Metrics = {name: Mean(numbers[name], batch.num_targets) for name in terms.stats_S}
    metrics |= {name: Sum(numbers[name]) for name in terms.parts_S}
    metrics["loss/total"] = Sum(total)
    metrics["loss/micro_batches"] = Sum(1)
    metrics["tokens/trained"] = Sum(batch.num_targets)
    metrics["tokens/processed"] = Sum(batch.num_tokens)
    metrics["tokens/padding_share"] = Mean(batch.input_ids_BT.numel() - batch.num_tokens, batch.input_ids_BT.numel())
    if "policy/ratio" in terms.stats_S:
        metrics["policy/ratio_max"] = Max(float(terms.stats_S["policy/ratio"].max()))
    return metrics


def _as_step(metrics: Metrics) -> Metrics:
    """Turn the summed losses of one optimizer step into means, so that several steps in one line are averaged."""
    is_loss = {n for n, m in metrics.items() if n.startswith("loss/") and isinstance(m, Sum) and n != "loss/micro_batches"}
    return {name: Mean(m.value) if name in is_loss else m for name, m in metrics.items()}
