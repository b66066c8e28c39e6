"""The loss terms of each token of a micro-batch, and the metrics of the same pass.

    targets (logprobs, advantages, old, reference)  ->  policy loss + kl_coef * KL - entropy_coef * entropy   [S]
    tokens of observations (logprobs)               ->  observation_coef * cross-entropy                      []

Terms are per token, and their coefficients are normalised over the global batch beforehand, so gradients of micro-batches
add up (I7).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyturn.algorithms.aggregate import check_average
from polyturn.algorithms.kl import kl_estimators
from polyturn.algorithms.losses import PolicyLoss, bind, cispo, clip_cov, gspo, gspo_sequence, ppo_clip
from polyturn.algorithms.losses.base import log_ratio
from polyturn.algorithms.options import AlgorithmOptions, DistillSettings, KlOptions
from polyturn.batching.layout import MicroBatch, ReadTargets
from polyturn.core.arrays import Floats
from polyturn.core.errors import ConfigError, TrainingError
from polyturn.core.metrics import Max, Mean, Metrics, Sum
from polyturn.core.sample import TrainSample
from polyturn.training.backend import TermWeights
from polyturn.training.model import ScoringModel, TargetScores
from polyturn.training.router_figures import Figures

_CLIPS_RATIO = (ppo_clip, cispo, gspo, gspo_sequence, clip_cov)
"""Losses whose clip_low bounds the ratio; of others, it bounds a logarithm or a divergence, or is a plug-in's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The loss: sum over tokens of coef * (policy_loss + kl - entropy + distill + balance), with a weight for each term
    after the first."""

    policy_loss: PolicyLoss = ppo_clip
    policy_loss_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Options of the policy loss, such as clip_low and clip_high."""
    distill: DistillSettings | None = None
    """Pulls the policy towards the teacher at the sampled tokens; None does not."""
    algorithm: AlgorithmOptions = field(default_factory=AlgorithmOptions)
    """The average over tokens, and all terms except the policy loss. The ratio's denominator is the samples' old_logprobs.
    A batch without old_logprobs counts as on-policy: the ratio is 1 and only its gradient matters, which is correct for
    exactly one update on fresh rollouts."""

    @property
    def kl(self) -> KlOptions:
        """The options of the KL to the reference; weight 0 if there is none."""
        return self.algorithm.kl_in("loss")

    def __post_init__(self) -> None:
        check_average(self.algorithm.aggregate.name, self.algorithm.segment_weight)
        low = self.policy_loss_kwargs.get("clip_low")
        if self.policy_loss in _CLIPS_RATIO and low is not None and 1 < low < math.inf:
            raise ConfigError(
                f"algorithm.loss.clip_low is {low}, and the ratio is never below 0; set it below 1, or to .inf for no bound"
            )
        kl_estimators.resolve(self.kl.name, key="algorithm.kl.estimator")
        if self.distill is not None:
            kl_estimators.resolve(self.distill.estimator, key="algorithm.loss.distill.estimator")


class Terms(NamedTuple):
    """The loss of each target of a micro-batch, and metrics."""

    loss_S: Tensor
    scores_S: Tensor
    """[S] detached output of the network for each target: its log-probability or its value."""
    stats_S: Mapping[str, Tensor] = {}
    """Name -> [S] detached; its mean over the targets of the step is the metric of that name."""
    parts_S: Mapping[str, Tensor] = {}
    """Name -> [S] detached addend of `loss_S`; its sum with the coefficients is the metric of that name."""
    own_S: Tensor | None = None
    """[S] detached log-probabilities under the weights at the start of the step, to compare with the engine's; None if the
    samples lack the engine's."""
    figures: Figures = MappingProxyType({})
    """Further metrics; a mean over nothing is left out."""
    observation: Tensor | None = None
    """[] the observation loss of the micro-batch, with coefficients; None without one."""

    def total(self, coef_S: Tensor) -> Tensor:
        """Return the loss of the micro-batch with these coefficients of its targets."""
        loss = (self.loss_S * coef_S).sum()
        return loss if self.observation is None else loss + self.observation


class Objective:
    """An objective per token."""

    def bind(self, samples: Sequence[TrainSample], weights: TermWeights) -> Callable[[ScoringModel, MicroBatch], Terms]:
        """Return a function from the network and a micro-batch of `samples` to terms with these weights.

        Raises:
            TrainingError: the samples lack arrays that the objective needs.
        """
        raise NotImplementedError

    def problem(self, samples: Sequence[TrainSample], batch: MicroBatch, terms: Terms, *, step: int) -> str:
        """Return the error message for a loss that is not finite: the first target with such a term, and its inputs."""
        # With the coefficient, as in the loss: 0 times infinity is NaN.
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
            f"the loss is not finite at optimizer step {step}: {len(bad)} of {batch.num_targets} tokens of a micro-batch, "
            f"first token {int(batch.token_S[s])} of sample {'/'.join(map(str, sample.id))} with loss "
            f"{terms.loss_S[s].item():g}, logprob {terms.scores_S[s].item():g}{numbers}; if the logprob is not finite look "
            "at the parameters (loss/grad_norm and loss/lr of the steps before), otherwise at the inputs of the token"
        )


class PolicyTerms(Objective):
    """The terms of the policy's loss, with their options bound."""

    def __init__(
        self, settings: LossSettings, *, has_reference: bool = False, teacher: Callable[[MicroBatch], Tensor] | None = None
    ) -> None:
        """Bind `settings`.

        Args:
            settings: The loss.
            has_reference: Whether the samples have the reference's log-probabilities, which a KL term needs.
            teacher: Returns [S] the teacher's log-probabilities for a micro-batch.

        Raises:
            ConfigError: a KL term without a reference, a distillation term without a teacher, or an option that the policy
                loss does not take.
        """
        if settings.kl.coef and not has_reference:
            raise ConfigError(f"kl.coef is {settings.kl.coef} and there is no reference policy; pass reference=True")
        if settings.distill is not None and teacher is None:
            raise ConfigError(f"distill.coef is {settings.distill.coef} and there is no teacher; pass one")
        self._settings = settings
        self._policy_loss = bind(settings.policy_loss, kwargs=settings.policy_loss_kwargs)
        self._teacher = teacher
        self._kl = kl_estimators.resolve(settings.kl.name)

    def bind(self, samples: Sequence[TrainSample], weights: TermWeights) -> Callable[[ScoringModel, MicroBatch], Terms]:
        """Return a function from the network and a micro-batch of `samples` to its terms, with the KL and entropy weights
        `weights`."""
        algorithm = self._settings.algorithm
        has_grad = weights.entropy != 0
        options = {"entropy_grad": has_grad if has_grad or weights.measures_entropy else None}
        options |= {"balance_grad": True} if algorithm.routing.balance_coef != 0 else {}
        return partial(self._terms, weights=weights, options=options)

    def _terms(self, network: ScoringModel, batch: MicroBatch, *, weights: TermWeights, options: Mapping[str, Any]) -> Terms:
        """Return the loss of each target: the policy loss times its correction, plus KL, entropy and teacher terms."""
        settings, algorithm, read = self._settings, self._settings.algorithm, batch.read
        read_scores: TargetScores = network(batch.with_observations, **options)
        scores = read_scores if read is None else read_scores.at(read.at_S)
        logprobs_S = scores.logprobs_S
        if batch.advantages_S is None:
            raise TrainingError("the samples have no advantages; run an advantage estimator before forward_backward")
        # On policy the ratio is 1 by definition, and its gradient is that of the log-probability (REINFORCE).
        old_S = logprobs_S.detach() if batch.old_logprobs_S is None else batch.old_logprobs_S
        sequence_S = torch.from_numpy(batch.sample_S).to(old_S.device, non_blocking=True)
        policy = self._policy_loss(logprobs_S, old_S, batch.advantages_S, sequence_S, batch.marks_S)
        # Decoupled PPO: rho = pi / mu stands outside of the clipped minimum (Hilton et al. 2022, equation 3).
        loss_S = policy.loss_T if batch.correction_S is None else policy.loss_T * batch.correction_S
        parts_S = {"loss/policy": loss_S.detach()}
        stats_S = {f"policy/{name}": value for name, value in policy.stats.items()}
        stats_S["policy/advantage"] = batch.advantages_S
        own_S: Tensor | None = None
        # Compare the engine with the weights at the start of the step: in a later minibatch this pass includes the step's
        # changes.
        if batch.rollout_logprobs_S is not None:
            is_ours = batch.old_logprobs_S is not None and algorithm.old_logprobs == "trainer"
            own_S = batch.old_logprobs_S if is_ours else logprobs_S.detach()
        if settings.kl.coef:
            assert batch.ref_logprobs_S is not None  # the policy scored samples without them before
            kl_S = self._kl(logprobs_S, batch.ref_logprobs_S)
            if settings.kl.importance:
                kl_S = kl_S * log_ratio(logprobs_S, old_S).exp()
            loss_S = loss_S + weights.kl * kl_S
            parts_S["loss/kl"] = weights.kl * kl_S.detach()
            stats_S["policy/kl_to_reference"] = kl_S.detach()
        if settings.distill is not None and self._teacher is not None:
            distill_S = kl_estimators.resolve(settings.distill.estimator)(logprobs_S, self._teacher(batch))
            stats_S["policy/kl_to_teacher"] = distill_S.detach()
            if batch.correction_S is not None:  # an expectation under the policy, estimated from the engine's tokens
                distill_S = distill_S * batch.correction_S
            loss_S = loss_S + settings.distill.coef * distill_S
            parts_S["loss/distill"] = settings.distill.coef * distill_S.detach()
        if scores.entropy_S is not None:  # a metric, with a gradient only if it is a term
            stats_S["policy/entropy"] = scores.entropy_S.detach()
            if weights.entropy:
                loss_S = loss_S - weights.entropy * scores.entropy_S
                parts_S["loss/entropy"] = -weights.entropy * scores.entropy_S.detach()
        balance_coef = algorithm.routing.balance_coef
        if scores.balance_S is not None and balance_coef:
            loss_S = loss_S + balance_coef * scores.balance_S
            parts_S["loss/router_balance"] = balance_coef * scores.balance_S.detach()
        terms = Terms(loss_S, logprobs_S.detach(), stats_S, parts_S, own_S, scores.figures)
        if read is None:
            return terms
        observation, figures = _observation_loss(read, read_scores.logprobs_S)
        return terms._replace(observation=observation, figures={**scores.figures, **figures})


def _observation_loss(read: ReadTargets, logprobs_R: Tensor) -> tuple[Tensor, Figures]:
    """Return the observation loss of a micro-batch, and its metrics.

    sum over observed tokens of coef * -log pi(o_t | all tokens before), coef = observation_coef / (observed tokens of the
    step). Source: Shrivastava et al. 2026, ECHO (arXiv 2605.24517), here as a mean over the tokens of a step.
    """
    nll_O = -logprobs_R[read.at_O]
    loss = (nll_O * read.coef_O).sum()
    count = len(nll_O)
    return loss, {
        "loss/observation": (loss.detach(), Sum),
        "policy/observation_nll": (nll_O.detach().sum(), partial(Mean, count=count)),
        "tokens/observed": (loss.new_full((), count), Sum),
    }


class SupervisedTerms(Objective):
    """The cross-entropy of each target."""

    def bind(self, samples: Sequence[TrainSample], weights: TermWeights) -> Callable[[ScoringModel, MicroBatch], Terms]:
        return self._terms

    def _terms(self, network: ScoringModel, batch: MicroBatch) -> Terms:
        logprobs_S = network(batch, entropy_grad=None).logprobs_S
        loss_S = -logprobs_S
        return Terms(loss_S, logprobs_S.detach(), parts_S={"loss/sft": loss_S.detach()})


class PassResults(NamedTuple):
    """The results of a pass, read from the device."""

    parts: list[Metrics]
    """The metrics of each micro-batch."""
    spoilt: tuple[MicroBatch, Terms] | None
    """The first micro-batch whose loss is not finite."""
    logprobs_N: Floats | None
    """[N] `Terms.own_S` at the targets of all micro-batches."""
    entropies_N: Floats | None
    """[N] the entropy at each of them."""


class PassFigures:
    """The results of a pass's micro-batches. They stay on the device until the end, so that the pass waits for it only
    once."""

    def __init__(self) -> None:
        self._batches: list[tuple[MicroBatch, Terms, Tensor]] = []

    def add(self, batch: MicroBatch, terms: Terms, loss: Tensor) -> None:
        """Add a micro-batch and its loss []."""
        values = [v.sum() for v in terms.stats_S.values()]
        values += [(v * batch.loss_coef_S).sum() for v in terms.parts_S.values()]
        values += [number for numbers, _ in terms.figures.values() for number in numbers.flatten()]
        if "policy/ratio" in terms.stats_S:
            values.append(terms.stats_S["policy/ratio"].max())
        # Detached, because a graph would keep the memory that the backward pass frees.
        kept = terms._replace(loss_S=terms.loss_S.detach(), observation=None)
        self._batches.append((batch, kept, torch.stack([loss.detach(), *values]).double()))

    @property
    def batches(self) -> list[MicroBatch]:
        """The micro-batches of the results."""
        return [batch for batch, *_ in self._batches]

    def read(self) -> PassResults:
        """Wait for the device, and return the results."""
        if not self._batches:
            return PassResults([], None, None, None)
        figures = [values for *_, values in self._batches]
        logprobs = [terms.own_S for _, terms, _ in self._batches if terms.own_S is not None]
        entropies = [terms.stats_S["policy/entropy"] for _, terms, _ in self._batches if "policy/entropy" in terms.stats_S]
        columns = [torch.cat(one).double() for one in (figures, logprobs, entropies) if one]
        read = iter(torch.cat(columns).cpu().split([len(column) for column in columns]))  # the only wait for the device
        numbers = iter(next(read).tolist())
        logprobs_N, entropies_N = (next(read).float().numpy() if one else None for one in (logprobs, entropies))
        parts: list[Metrics] = []
        spoilt: tuple[MicroBatch, Terms] | None = None
        for batch, terms, _ in self._batches:
            total = next(numbers)
            parts.append(_batch_metrics(batch, terms, total, numbers))
            if spoilt is None and not math.isfinite(total):
                spoilt = batch, terms
        return PassResults(parts, spoilt, logprobs_N, entropies_N)


def _batch_metrics(batch: MicroBatch, terms: Terms, total: float, numbers: Iterator[float]) -> Metrics:
    metrics: Metrics = {name: Mean(next(numbers), batch.num_targets) for name in terms.stats_S}
    metrics |= {name: Sum(next(numbers)) for name in terms.parts_S}
    for name, (tensor, metric) in terms.figures.items():
        one = metric(*(next(numbers) for _ in range(tensor.numel())))
        if not isinstance(one, Mean) or one.count:
            metrics[name] = one
    metrics["loss/total"] = Sum(total)
    metrics["loss/micro_batches"] = Sum(1)
    metrics["tokens/trained"] = Sum(batch.num_targets)
    metrics["tokens/processed"] = Sum(batch.num_tokens)
    metrics["tokens/padding_share"] = Mean(batch.input_ids_BT.numel() - batch.num_tokens, batch.input_ids_BT.numel())
    if "policy/ratio" in terms.stats_S:
        metrics["policy/ratio_max"] = Max(next(numbers))
    return metrics


def as_step(metrics: Metrics) -> Metrics:
    """Turn the summed losses of one optimizer step into means, so that several steps in one line of metrics are averaged."""
    is_loss = {n for n, m in metrics.items() if n.startswith("loss/") and isinstance(m, Sum) and n != "loss/micro_batches"}
    return {name: Mean(m.value) if name in is_loss else m for name, m in metrics.items()}
