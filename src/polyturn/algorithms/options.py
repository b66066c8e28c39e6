"""Options of averages, KL terms, routers, off-policy correction and distillation.

    algorithm: {loss: {correction: {cap: 2.0, reject: {seq_mean_k1: [0.99, 1.01]}}}, aggregate: seq-mean-token-sum}

This module does not import torch, because configurations are also read without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from polyturn.core.errors import ConfigError, UnknownNameError, did_you_mean
from polyturn.infra.live import LiveObject, NameOrObject

Bound = Annotated[float, Field(allow_inf_nan=True)]
"""A bound; infinity means no bound."""
WEIGHTS = ("none", "token", "sequence", "geometric")
REJECTIONS = (
    *(f"{level}_{kind}" for level in ("token", "seq_sum", "seq_mean") for kind in ("k1", "k2", "k3")),
    "seq_max_k2",
    "seq_max_k3",
    "token_binary_kl",
)
"""Estimates, which `reject` can bound, of how far the trained policy pi is from the sampling policy mu: of a token, or the
sum, mean or maximum over a sequence. For k1 the bounds apply to the ratio rho = pi / mu, so seq_mean_k1 bounds the geometric
mean of rho. token_binary_kl is KL(mu || pi) of the two outcomes "this token, or another"."""


def by_name(value: Any) -> Any:
    """Turn a bare name into options with that name."""
    return {"name": value} if isinstance(value, str | LiveObject) else value


class Bounds(NamedTuple):
    """The interval in which samples and tokens are kept."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSettings:
    """Off-policy correction: the weight of tokens sampled by a policy that differs from the trained one."""

    weight: Literal["none", "token", "sequence", "geometric"] = "token"
    """Importance weights of the policy loss, from the ratio rho of trained to sampling policy. token: rho of each token,
    truncated importance sampling. sequence: for every token the product of rho over its segment, unbiased but of high
    variance. geometric: for every token the geometric mean of rho over its segment. none: only reject and measure."""
    cap: Annotated[Bound, Field(gt=0)] = 2.0
    """Upper bound of weights: min(rho, cap), Ionides 2008."""
    beyond: Literal["truncate", "drop"] = "truncate"
    """The value of a weight above the cap: the cap, or 0."""
    normalize: bool = False
    """Divide the weights by their mean over the step."""
    reject: Mapping[str, Bound | tuple[Bound, Bound]] = field(default_factory=dict)
    """Bounds beyond which tokens leave the loss, for instance {seq_mean_k1: [0.99, 1.01]}. A name joins token, seq_sum,
    seq_mean or seq_max with k1, k2 or k3; seq_ removes whole segments. For k1 the bounds apply to the ratio, and a single
    number is the upper bound and its inverse the lower one. For k2, k3 and token_binary_kl (the KL of "this token, or
    another") a single number is the upper bound."""
    veto: Annotated[float, Field(gt=0, lt=1)] | None = None
    """A segment with any ratio below this leaves the loss, for instance 1e-4: the trainer considers one of its sampled
    tokens nearly impossible."""
    negative_bound: Annotated[float, Field(gt=0)] | None = None
    """A segment of negative advantage leaves the loss if the policy has moved away from it by more than this, in nats per
    token (DeepSeek 2025, DeepSeek-V3.2, equation 9). Mistakes that the policy no longer makes teach nothing."""

    def __post_init__(self) -> None:
        if self.weight not in WEIGHTS:
            raise UnknownNameError(f"there is no correction weight {self.weight!r}.{did_you_mean(self.weight, WEIGHTS)}")
        if self.beyond not in ("truncate", "drop"):
            raise ConfigError(f"the correction's `beyond` is {self.beyond!r}; it must be 'truncate' or 'drop'")
        if not self.cap > 0:
            raise ConfigError(f"the cap of correction weights is {self.cap}; it must be above 0")
        for name, (low, high) in self.bounds.items():
            if name not in REJECTIONS:
                raise UnknownNameError(f"there is no rejection by {name!r}.{did_you_mean(name, REJECTIONS)}")
            if not low < high or (name.endswith("_k1") and not low <= 1 <= high):
                contains = ", and the interval must contain the ratio 1 of equal policies" if name.endswith("_k1") else ""
                raise ConfigError(f"the bounds of {name} are {low} and {high}; the first must be below the second{contains}")
        if self.veto is not None and not 0 < self.veto < 1:
            raise ConfigError(f"the correction's veto is {self.veto}; it must be a ratio between 0 and 1, for instance 1e-4")

    @property
    def bounds(self) -> dict[str, Bounds]:
        """The interval of each estimate that `reject` names."""
        return {name: _bounds(name, value) for name, value in self.reject.items()}


def _bounds(name: str, value: float | tuple[float, float]) -> Bounds:
    if isinstance(value, tuple):
        return Bounds(*value)
    return Bounds(1 / value if value else math.inf, value) if name.endswith("_k1") else Bounds(-math.inf, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageOptions:
    """The reduction of token losses to one number."""

    PART: ClassVar[str] = "seq-mean-token-sum-norm"

    name: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    """The weight of each token (docs/algorithms.md)."""
    norm_length: Annotated[float, Field(gt=0)] | None = None
    """The constant of seq-mean-token-sum-norm; null takes the longest trajectory of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlOptions:
    """The KL from a reference: a term of the loss, or a penalty on the reward of every trained token."""

    coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the term; 0 turns it off and loads no reference for it."""
    place: Literal["loss", "reward"] = "loss"
    """Whether the term is part of the loss, or of the rewards from which advantages are computed."""
    estimator: str | None = None
    """k1, k2, k3 or abs; in the loss also k1+, k3+ and abs+, which have the value of the named estimator and the gradient of
    k2, the gradient of the KL. Null takes k3 in the loss and k1 in the reward."""
    target: Annotated[float, Field(gt=0)] | None = None
    """Target of the KL per token, in nats, to which the weight adapts; null keeps the weight at `coef`."""
    horizon: Annotated[float, Field(gt=0)] = 10_000
    """Number of trajectories over which the weight adapts."""
    importance: bool = False
    """Multiply the term of the loss by the token's ratio, including its gradient, so that tokens sampled by an older policy
    estimate the KL of the trained one (DeepSeek 2025, DeepSeek-V3.2, section 3.1)."""

    def __post_init__(self) -> None:
        if self.target is not None and not self.coef:
            raise ConfigError(f"algorithm.kl.target is {self.target} and coef is 0; set coef to the initial weight")
        if self.importance and self.place == "reward":
            raise ConfigError(
                "algorithm.kl.importance applies to a KL in the loss, and this KL is in the reward; remove importance"
            )

    @property
    def name(self) -> str:
        """The estimator's name."""
        return self.estimator or {"loss": "k3", "reward": "k1"}[self.place]


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillSettings:
    """On-policy distillation: a loss term that pulls the policy towards a teacher at the tokens that the policy sampled."""

    teacher: str
    """Folder or hub id of a model with the same vocabulary."""
    coef: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the term relative to the policy loss; with `loss: none` it is the only term."""
    estimator: str = "k1+"
    """The estimator of KL(policy || teacher), a name that `kl.estimator` takes."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the teacher's weights; null takes the model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherAdvantageOptions:
    """An advantage from a teacher: the difference of teacher and policy log-probabilities at the sampled tokens."""

    coef: Annotated[float, Field(gt=0)] = 1.0
    """Weight of log teacher - log policy in the advantage of each sampled token."""
    advantage_coef: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the estimator's advantage; 0 learns from the teacher only."""
    level: Literal["token", "turn"] = "token"
    """token: each token has its own difference. turn: each token has the mean difference of its turn."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Largest absolute difference, in nats; null does not clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfDistillOptions(TeacherAdvantageOptions):
    """Self-distillation: the teacher is the policy itself, with privileged text in its prompt."""

    PART: ClassVar[str] = "self-distillation"

    privileged: NameOrObject
    """The source of the privileged text: a column of the row (a hint, a solution, `ground_truth`), or `file.py:function`,
    which returns it for a trajectory and its group, for instance the environment's feedback."""
    template: str = "{privileged}"
    """Text appended to the prompt's last user message after an empty line; `{privileged}` stands for the privileged text."""
    missing: Literal["error", "skip"] = "error"
    """For a row without privileged text. error: end the run. skip: train it on the estimator's advantage only, and count
    it."""

    def __post_init__(self) -> None:
        if "{privileged}" not in self.template:
            raise ConfigError(
                f"algorithm.self_distill.template is {self.template!r} and does not contain the privileged text; write "
                "{privileged} where it belongs"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTeacherOptions:
    """One teacher behind an endpoint."""

    url: str
    """Root of the server, such as http://10.0.0.7:8000."""
    kind: Literal["vllm", "sglang"] = "vllm"
    """The server's route: /v1/completions with `prompt_logprobs` (vllm), or /generate with `return_logprob` (sglang)."""
    model: str | None = None
    """Name of the model on the server; null takes the first that /v1/models lists."""
    tokenizer: str | None = None
    """Folder or hub id of the teacher's tokenizer, for a server without /tokenize; null asks the server."""
    data_sources: tuple[str, ...] = ()
    """The data sources whose rows this teacher teaches; empty: all rows that no other teacher names."""
    api_key_env: str | None = None
    """Environment variable that holds the server's key."""
    timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Deadline of one request, in seconds."""
    max_concurrent: Annotated[int, Field(ge=1)] = 32
    """Largest number of concurrent requests."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"algorithm.served_teachers has the url {self.url!r}; write it with its scheme, for example "
                "http://127.0.0.1:8000"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTeachersOptions(TeacherAdvantageOptions):
    """On-policy distillation from teachers behind endpoints, each for certain data sources."""

    PART: ClassVar[str] = "served teachers"

    teachers: Annotated[tuple[ServedTeacherOptions, ...], Field(min_length=1)]
    """The teachers; all must have the policy's vocabulary."""

    def __post_init__(self) -> None:
        named = [source for one in self.teachers for source in one.data_sources or ("",)]
        if twice := next((source for source in named if named.count(source) > 1), None):
            raise ConfigError(
                f"algorithm.served_teachers: two teachers have the data source {twice!r}; leave it out of one of them"
            )
        if named.count("") > 1:
            raise ConfigError(
                "algorithm.served_teachers: two teachers have no data_sources; set data_sources of all but one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingOptions:
    """The routers of a mixture of experts."""

    PART: ClassVar[str] = "a mixture of experts"

    replay: Literal["auto", "on", "off"] = "auto"
    """Whether training sends each token to the experts that processed it during sampling (R3, arXiv 2510.11370). The router
    still computes the weights of these experts. auto: yes, if the model has experts and the engine reports the routes. on:
    yes, and an error if that is impossible."""
    balance_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the loss that balances the load of the experts (`algorithms/balance.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmOptions:
    """Options from rewards to loss that apply to every estimator and policy loss."""

    aggregate: Annotated[AverageOptions, BeforeValidator(by_name)] = AverageOptions()
    segment_weight: Literal["per_token", "per_trajectory"] = "per_token"
    """The total weight of a trajectory's segments. per_token: proportional to their tokens. per_trajectory: equal for all
    trajectories. Within a trajectory all tokens weigh the same, wherever its history was cut into segments."""
    loss_scale: NameOrObject = "default"
    """The sampled tokens to train. default or all: all. last_round: the last message of each sample. ignore_empty_think: all
    but the tokens of `<think></think>`. ignore_think_prefix: all but the `<think>` at the start of a turn. Or
    `file.py:function`. `a+b` multiplies the weights of both. Weights that a scheduler set are kept."""
    kl: KlOptions | list[KlOptions] = KlOptions()
    """The KL from the weights at the start of the run, or from `model.reference`; a list to have one in the loss and one in
    the reward."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; with `entropy_target` its initial value."""
    entropy_target: Annotated[float, Field(gt=0)] | None = None
    """Target of the mean entropy per token, in nats. Below it the bonus grows step by step, above it the bonus is off. Null
    keeps the weight at `entropy_coef`."""
    entropy_step: Annotated[float, Field(gt=0)] = 0.005
    """Change of the entropy bonus's weight in one step."""
    entropy_every: Annotated[int, Field(ge=1)] = 1
    """Measure the entropy in every n-th optimizer update, which on a CPU takes a further pass over the logits. An entropy
    bonus measures it in every update."""
    high_entropy_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The policy loss is computed on this share of the step's trained tokens, the tokens with the highest entropy."""
    observation_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the cross-entropy on tokens that tools, users and environments wrote (ECHO), averaged over the observed
    tokens of the step. The task's prompt is not an observation."""
    self_distill: SelfDistillOptions | None = None
    """Learn from the policy itself, with privileged text in its prompt; null does not."""
    served_teachers: ServedTeachersOptions | None = None
    """Learn from teachers behind endpoints; null does not."""
    routing: RoutingOptions = RoutingOptions()
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    """The denominator of the ratio if a step takes several updates or is stale. trainer: computed before the step. engine:
    the engine's log-probabilities, which saves a forward pass and is correct if engine and trainer agree, as with the
    embedded engine."""
    drop_truncated: bool = False
    """Leave out of the loss the trajectories that a limit ended; they still count in the statistics of their group."""
    drop_zero_variance: bool | None = None
    """Leave out of the loss the groups whose members all have the same reward. Null does so if the estimator uses only
    rewards, so that every advantage of such a group is 0."""

    def __post_init__(self) -> None:
        terms = [one.place for one in self._kl_terms]
        if len(set(terms)) < len(terms):
            raise ConfigError(
                "algorithm.kl: two entries have the same place; give at most one for the loss and one for the reward"
            )
        if self.entropy_target is not None and self.entropy_coef < 0:
            raise ConfigError(
                f"algorithm.entropy_target is {self.entropy_target:g} and entropy_coef {self.entropy_coef:g}, which lowers "
                "entropy; set entropy_coef to 0 or more"
            )
        if self.self_distill is not None and self.served_teachers is not None:
            raise ConfigError("algorithm.self_distill and algorithm.served_teachers both change advantages; set one of them")

    def kl_in(self, where: Literal["loss", "reward"]) -> KlOptions:
        """Return the KL of the loss or of the reward; one with weight 0 if there is none."""
        return next((one for one in self._kl_terms if one.place == where), KlOptions(place=where))

    @property
    def teacher(self) -> TeacherAdvantageOptions | None:
        """The options of the teacher that changes advantages; None without one."""
        return self.self_distill or self.served_teachers

    @property
    def learns_without_rewards(self) -> bool:
        """Whether a trajectory can teach even if all rewards of its group are equal."""
        return self.observation_coef > 0 or self.teacher is not None

    @property
    def has_kl(self) -> bool:
        """Whether any KL term has a weight, so that the run needs a reference."""
        return any(one.coef for one in self._kl_terms)

    @property
    def _kl_terms(self) -> list[KlOptions]:
        return self.kl if isinstance(self.kl, list) else [self.kl]
