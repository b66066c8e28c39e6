"""ModelPolicy: the trained model over a `Backend`, with the computations over a whole step.

    samples (one optimizer step) -> missing arrays (reference, marks) -> loss_coefs -> Backend.forward_backward
    optim_step: Backend.optim_step

Quantities of a whole step are computed here once, for any number of ranks: the coefficients, the choice of marked tokens,
the weights of the KL term and the entropy bonus.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor
from transformers import PreTrainedModel

from polyturn.algorithms.aggregate import loss_coefs
from polyturn.algorithms.entropy_target import EntropyController
from polyturn.algorithms.high_entropy import select_high_entropy
from polyturn.algorithms.kl import KlController
from polyturn.algorithms.losses import mark, selection_of
from polyturn.batching.layout import LayoutSettings
from polyturn.core.arrays import Floats
from polyturn.core.errors import ConfigError, TrainingError
from polyturn.core.metrics import Mean, Metrics, Sum
from polyturn.core.protocols import PassResult
from polyturn.core.sample import TrainSample
from polyturn.engines.routers import Routers
from polyturn.tokens.multimodal import MediaProcessor
from polyturn.tokens.positions import MediaRows
from polyturn.training.backend import ENTROPY, OWN, REFERENCE, Backend, OverBackend, TermWeights
from polyturn.training.lora import has_lora
from polyturn.training.loss_terms import LossSettings, PolicyTerms, SupervisedTerms
from polyturn.training.model_backend import ModelBackend, Placement, fitting_layout
from polyturn.training.optim import OptimSettings
from polyturn.training.reference import AdapterReference, FrozenModel, Scorer, require_same_vocabulary


class ModelPolicy(OverBackend):
    """The trained model; implements `core.protocols.Policy`."""

    def __init__(self, backend: Backend, *, loss: LossSettings | None = None) -> None:
        """Train `backend`.

        Args:
            backend: A backend from `policy_backend`, or one over ranks, made with the same `loss`.
            loss: The loss, for quantities of a whole batch; None takes the defaults.
        """
        self.backend = backend
        self.loss_settings = loss or LossSettings()
        self.kl = KlController(self.loss_settings.kl)
        """The weight of the KL term."""
        self.entropy = EntropyController(self.loss_settings.algorithm)
        """The weight of the entropy bonus."""
        self.train_seconds = 0.0
        """Seconds spent in forward and backward passes, `score` included, and in optimizer steps so far."""

    @property
    def step_count(self) -> int:
        """Number of optimizer steps, taken or skipped."""
        return self.backend.step_count

    def score(self, samples: Sequence[TrainSample], *, reference: bool = False) -> list[Floats]:
        """Return for each sample [T] the log-probability of each weighted token, 0 elsewhere.

        Raises:
            ConfigError: `reference` is set, and the policy has none.
        """
        return self._scored(samples, REFERENCE if reference else OWN)

    def forward_backward(self, samples: Sequence[TrainSample], *, coefs: Sequence[ArrayLike] | None = None) -> PassResult:
        """Add the gradient of the policy loss over `samples`, the samples of one optimizer step.

        Args:
            samples: Samples with `advantages` and, unless they are on-policy, old_logprobs. If the loss has a KL term,
                missing ref_logprobs are computed.
            coefs: For each sample [T]; None computes them over `samples` by `AlgorithmOptions.aggregate`.

        Raises:
            TrainingError: the samples lack arrays that the loss needs; the gradient is cleared. If the loss is not finite,
                `optim_step` skips the step or ends the run.
        """
        loss = self.loss_settings
        lacking = next((s.id for s in samples if s.advantages is None), None)
        if lacking is not None:
            raise TrainingError(f"sample {lacking} has no advantages; run an advantage estimator before forward_backward")
        if loss.kl.coef and any(s.ref_logprobs is None for s in samples):
            scores = self.score(samples, reference=True)
            samples = [s.replace(ref_logprobs=lp) for s, lp in zip(samples, scores, strict=True)]
        samples = with_marks(samples, loss, score=self.score, seed=self.step_count)
        figures: Metrics = {}
        if loss.algorithm.high_entropy_share < 1 and samples:
            entropies = self._scored(samples, ENTROPY)
            samples, threshold = select_high_entropy(samples, entropies, loss.algorithm.high_entropy_share)
            figures["policy/high_entropy_threshold"] = Mean(threshold)
        if coefs is None:
            average, weight = loss.algorithm.aggregate, loss.algorithm.segment_weight
            coefs = loss_coefs(samples, mode=average.name, norm_length=average.norm_length, segment_weight=weight)
        samples = with_observation_coefs(samples, loss.algorithm.observation_coef)
        is_measured = loss.algorithm.entropy_target is not None or self.step_count % loss.algorithm.entropy_every == 0
        weights = TermWeights(self.kl.coef, self.entropy.coef, measures_entropy=is_measured)
        result = self.backend.forward_backward(samples, coefs, "policy", weights)
        return self._counted(result._replace(metrics={**result.metrics, **figures}))

    def sft_forward_backward(self, samples: Sequence[TrainSample]) -> Metrics:
        """Add the gradient of the weighted cross-entropy over `samples`, averaged over the weights of the whole batch.

        If the loss is not finite, `optim_step` skips the step or ends the run.
        """
        coefs = loss_coefs(samples, mode="token-mean")
        return self._counted(self.backend.forward_backward(samples, coefs, "supervised")).metrics

    def optim_step(self) -> Metrics:
        """Take one optimizer step from the summed gradient, on all ranks or on none, and clear it.

        Raises:
            TrainingError: more consecutive steps had a loss or gradient that is not finite than may be skipped.
        """
        start = time.perf_counter()
        metrics = self.backend.optim_step()
        seconds = time.perf_counter() - start
        self.train_seconds += seconds
        return metrics | {"time/optim": Sum(seconds)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state outside the backend: the weights of the KL term and the entropy bonus."""
        return {"kl": self.kl.state_dict(), "entropy": self.entropy.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self.kl.load_state_dict(state.get("kl", {}))
        self.entropy.load_state_dict(state.get("entropy", {}))

    def weights(self) -> Mapping[str, Tensor]:
        """Return name -> weight without gradient, for an engine, with an adapter merged. In one process these are the live
        tensors, or copies if there is an adapter; from ranks they are streamed."""
        return self.backend.weights()

    def close(self) -> None:
        """Free the gradient and the frozen models, or end the ranks."""
        self.backend.close()

    def _scored(self, samples: Sequence[TrainSample], scorer: str) -> list[Floats]:
        start = time.perf_counter()
        scores = self.backend.score(samples, scorer)
        self.train_seconds += time.perf_counter() - start
        return scores

    def _counted(self, result: PassResult) -> PassResult:
        """Count the time of a pass, and drop metrics that are not finite, because curves cannot show NaN."""
        self.train_seconds += result.metrics["time/forward_backward"].value
        if result.is_finite:
            return result
        return result._replace(metrics={name: m for name, m in result.metrics.items() if math.isfinite(m.value)})


def local_policy(model: PreTrainedModel, *, loss: LossSettings | None = None, **options: Any) -> ModelPolicy:
    """Return a policy that trains `model` in this process; `options` go to `policy_backend`."""
    return ModelPolicy(policy_backend(model, loss=loss, **options), loss=loss)


def policy_backend(
    model: PreTrainedModel,
    *,
    optim: OptimSettings,
    loss: LossSettings | None = None,
    layout: LayoutSettings | None = None,
    reference: bool | PreTrainedModel = False,
    teacher: PreTrainedModel | None = None,
    media: MediaProcessor | None = None,
    placement: Placement | None = None,
) -> ModelBackend:
    """Return a backend that trains `model` itself, not a copy; its tensors are only written in place.

    Args:
        model: The model on its device, in its dtype; on ranks either whole, or unread and filled by `placement`.
        optim: The optimizer and its schedule.
        loss: The policy loss, and whether routes are replayed; None takes the defaults.
        layout: The size and layout of micro-batches; samples lie in padded rows if the model cannot be packed.
        reference: For the KL term and the scorer `REFERENCE`: True keeps a frozen copy of `model` (with LoRA, only of its
            adapter); another model is used without a copy.
        teacher: The model to distil from.
        media: The model's processor, for samples that show images, videos or sounds; None for text.
        placement: The devices of the parameters; None leaves them where they are.

    Raises:
        ConfigError: a balance term without experts, a KL term without a reference, a distillation term without a teacher, a
            teacher with another vocabulary, or a model that cannot be split as `placement` asks.
    """
    placement, loss = placement or Placement(), loss or LossSettings()
    for other, name in ((reference, "reference"), (teacher, "teacher")):
        if isinstance(other, PreTrainedModel):
            require_same_vocabulary(model, other, name=name)
    balance, replays = loss.algorithm.routing.balance_coef, loss.algorithm.routing.replay != "off"
    routers = Routers.of(model) if replays or balance else None
    if balance and routers is None:
        raise ConfigError(f"balance_coef is {balance:g} and {type(model).__name__} has no experts; set it to 0")
    network = placement.policy(model.train(), routers=routers, replays=replays)
    scorer: Scorer | None = None
    if isinstance(reference, PreTrainedModel):
        scorer = _frozen(reference, placement, is_kept=False)
    elif reference and not has_lora(model):
        scorer = _frozen(copy.deepcopy(model), placement, is_kept=True)  # before the model is placed, while it is whole
    optimizer = placement.optimizer(network, optim)
    if reference is True and has_lora(model):  # after placing: each rank keeps its part of a sharded adapter
        scorer = AdapterReference(network, placement.adapter_replaced)
    teaching = None if teacher is None else _frozen(teacher, placement, is_kept=False)
    frozen = [one.network for one in (scorer, teaching) if isinstance(one, FrozenModel)]
    fitting, is_refused = fitting_layout(layout or LayoutSettings(), [network, *frozen], placement)
    teacher_logprobs = None if teaching is None else teaching.logprobs
    terms = PolicyTerms(loss, has_reference=scorer is not None, teacher=teacher_logprobs)
    return ModelBackend(
        network,
        optimizer=optimizer,
        objectives={"policy": terms, "supervised": SupervisedTerms()},
        placement=placement,
        layout=fitting,
        media=None if media is None else MediaRows(model, media),
        reference=scorer,
        is_packing_refused=is_refused,
    )


def _frozen(model: PreTrainedModel, placement: Placement, *, is_kept: bool) -> FrozenModel:
    network = placement.policy(model.requires_grad_(False), is_copy=is_kept).eval()
    placement.freeze(network, is_copy=is_kept)
    return FrozenModel(network, is_kept=is_kept, release=placement.release)


def with_observation_coefs(samples: Sequence[TrainSample], coef: float) -> Sequence[TrainSample]:
    """Normalise the weights of observed tokens over the step, and multiply them by `coef`.

    Args:
        samples: Everything that one optimizer step trains on, of all ranks.
        coef: `observation_coef`; 0 leaves observations out of the pass.

    Raises:
        TrainingError: a sample has no `observed`.
    """
    if not coef:
        return [s if s.observed is None else s.replace(observed=None) for s in samples]
    weights = [s.observed for s in samples if s.observed is not None]
    if len(weights) < len(samples):
        lacking = next(s.id for s in samples if s.observed is None)
        raise TrainingError(
            f"observation_coef is {coef:g} and sample {lacking} has no `observed`; call `to_samples` with observed=True"
        )
    scale = coef / max(1.0, sum(float(w.sum(dtype=np.float64)) for w in weights))
    return [s.replace(observed=w * scale) for s, w in zip(samples, weights, strict=True)]


def with_marks(
    samples: Sequence[TrainSample],
    settings: LossSettings,
    *,
    score: Callable[[Sequence[TrainSample]], list[Floats]],
    seed: int,
) -> Sequence[TrainSample]:
    """Set the marks that the policy loss's selection chooses over the whole step, unless they are set.

    Args:
        samples: Everything that one optimizer step trains on, of all ranks.
        settings: The loss.
        score: Computes log-probabilities under the current policy, for samples without old_logprobs.
        seed: Seed of the choice.
    """
    selection = selection_of(settings.policy_loss, kwargs=settings.policy_loss_kwargs)
    if selection is None or all(s.marks is not None for s in samples):
        return samples
    # These scores only serve the choice and are not returned with the samples: on policy, the loss uses the
    # log-probabilities of its own pass as the old ones.
    scored = list(samples)
    if any(s.old_logprobs is None for s in samples):
        scored = [s.replace(old_logprobs=lp) for s, lp in zip(samples, score(samples), strict=True)]
    marks = mark(scored, selection, seed=seed)
    return [s.replace(marks=m) for s, m in zip(samples, marks, strict=True)]
