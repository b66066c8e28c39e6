"""Options of the mathematics of training: averages, KL terms, routers, off-policy correction, distillation.

    algorithm: {loss: {correction: {cap: 2.0, reject: {seq_mean_k1: [0.99, 1.01]}}}, aggregate: seq-mean-token-sum}

Separate from `correction.py`, because a configuration is read where torch is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from polyturn.core.errors import ConfigError, UnknownNameError, did_you_mean
from polyturn.core.live import LiveObject, NameOrObject

Bound = Annotated[float, Field(allow_inf_nan=True)]
"""A number that may be infinite, which bounds nothing."""
WEIGHTS = ("none", "token", "sequence", "geometric")
REJECTIONS = (
    *(f"{level}_{kind}" for level in ("token", "seq_sum", "seq_mean") for kind in ("k1", "k2", "k3")),
    "seq_max_k2",
    "seq_max_k3",
    "token_binary_kl",
)
"""Estimates that are held to bounds: the divergence of pi from mu, of a token or summed, averaged or maximal over a
sequence. Of k1 the bounds are those of the ratio, so that seq_mean_k1 bounds the geometric mean of rho. token_binary_kl is
KL(mu, pi) of "this token, or another"."""


def by_name(value: Any) -> Any:
    """Return the options of a part that is written by its name alone."""
    return {"name": value} if isinstance(value, str | LiveObject) else value


class Bounds(NamedTuple):
    """An interval; samples and tokens within it are kept."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSettings:
    """Off-policy correction: what tokens count that an engine sampled which was not quite the policy that is trained."""

    weight: Literal["none", "token", "sequence", "geometric"] = "token"
    """Importance weights of the policy loss. token: rho of each token, truncated importance sampling. sequence: the product
    of rho over the segment, for each of its tokens; unbiased and of high variance. geometric: its geometric mean. none only
    rejects and measures."""
    cap: Annotated[Bound, Field(gt=0)] = 2.0
    """Weights above it are cut to it: min(rho, cap), Ionides 2008."""
    beyond: Literal["truncate", "drop"] = "truncate"
    """The value of a weight above the cap: the cap, or 0."""
    normalize: bool = False
    """Divide the weights by their mean over the step."""
    reject: Mapping[str, Bound | tuple[Bound, Bound]] = field(default_factory=dict)
    """Bounds beyond which tokens leave the loss, for instance {seq_mean_k1: [0.99, 1.01]}: token, seq_sum, seq_mean or
    seq_max, and k1 (bounds of the ratio; one number is the upper, its inverse the lower), k2 or k3 (one, the upper). A
    segment leaves with all of its tokens. token_binary_kl (one, the upper) is that of "this token, or another"."""
    veto: Annotated[float, Field(gt=0, lt=1)] | None = None
    """A segment with any ratio below this leaves the loss, for instance 1e-4: the trainer finds a token nearly impossible
    that was sampled."""
    negative_bound: Annotated[float, Field(gt=0)] | None = None
    """A segment of negative advantage leaves the loss where the policy has moved away from it by more than this, in nats per
    token (DeepSeek 2025, DeepSeek-V3.2, equation 9): mistakes that this policy no longer makes teach nothing."""

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
                raise ConfigError(f"the bounds of {name} are {low} and {high}; what they keep must hold equal policies")
        if self.veto is not None and not 0 < self.veto < 1:
            raise ConfigError(f"the correction's veto is {self.veto}; it is a ratio between 0 and 1, for instance 1e-4")

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
    """Its weight; 0 is none, and keeps no reference for it."""
    place: Literal["loss", "reward"] = "loss"
    """The place of the term: in the loss, or in the rewards, before advantages are computed."""
    estimator: str | None = None
    """k1, k2, k3 or abs; in the loss also k1+, k3+ and abs+, which have the value of that and the gradient of k2, which is
    that of the KL. Null is k3 in the loss and k1 in the reward."""
    target: Annotated[float, Field(gt=0)] | None = None
    """The KL per token, in nats, that the weight is steered to; null keeps the weight at `coef`."""
    horizon: Annotated[float, Field(gt=0)] = 10_000
    """Trajectories over which the weight follows its target."""
    importance: bool = False
    """Multiply the term of the loss by the token's ratio, with its gradient, so that tokens that an older policy sampled
    estimate the KL of the one that is trained (DeepSeek 2025, DeepSeek-V3.2, section 3.1)."""

    def __post_init__(self) -> None:
        if self.target is not None and not self.coef:
            raise ConfigError(f"algorithm.kl.target is {self.target} and its coef is 0; set coef to a first weight")
        if self.importance and self.place == "reward":
            raise ConfigError("algorithm.kl.importance is for a KL in the loss, and this one is in the reward; leave it out")

    @property
    def name(self) -> str:
        """The estimator's name."""
        return self.estimator or {"loss": "k3", "reward": "k1"}[self.place]


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillSettings:
    """On-policy distillation: the loss draws the policy to a teacher on the tokens that the policy sampled."""

    teacher: str
    """Folder or hub id of a model with the same vocabulary."""
    coef: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the term beside the policy loss; `loss: none` leaves it alone."""
    estimator: str = "k1+"
    """The estimator of KL(policy || teacher), a name that `kl.estimator` takes."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the teacher's weights; null takes the model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherAdvantageOptions:
    """An advantage from a teacher: the difference of log-probabilities at the tokens that the policy sampled."""

    coef: Annotated[float, Field(gt=0)] = 1.0
    """Weight of log teacher - log policy in the advantage of each sampled token."""
    advantage_coef: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the estimator's advantage beside it; 0 learns from the teacher alone."""
    level: Literal["token", "turn"] = "token"
    """token: each token has its own difference. turn: each token has the mean difference of its turn."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Largest absolute difference, in nats; null does not clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfDistillOptions(TeacherAdvantageOptions):
    """Self-distillation: the teacher is the policy itself, with privileged text in its prompt."""

    PART: ClassVar[str] = "self-distillation"

    privileged: NameOrObject
    """A column of the row (a hint, a solution, `ground_truth`), or `file.py:function` from a trajectory and its group to
    text, for instance the environment's feedback."""
    template: str = "{privileged}"
    """The text that joins the prompt's last user message, behind an empty line; `{privileged}` stands for the privileged
    text."""
    missing: Literal["error", "skip"] = "error"
    """A row without privileged text ends the run, or is trained on the estimator's advantage alone and counted."""

    def __post_init__(self) -> None:
        if "{privileged}" not in self.template:
            raise ConfigError(
                f"algorithm.self_distill.template is {self.template!r} and never shows the privileged text; write "
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
    """The `data_source` of the rows that it teaches; empty teaches every row that no other teacher names."""
    api_key_env: str | None = None
    """Environment variable that holds the server's key."""
    timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Deadline of one request, in seconds."""
    max_concurrent: Annotated[int, Field(ge=1)] = 32
    """Requests at once."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"algorithm.served_teachers has the url {self.url!r}; write it with its scheme, for example "
                "http://127.0.0.1:8000"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTeachersOptions(TeacherAdvantageOptions):
    """On-policy distillation from teachers behind endpoints, each for its data sources."""

    PART: ClassVar[str] = "served teachers"

    teachers: Annotated[tuple[ServedTeacherOptions, ...], Field(min_length=1)]
    """The teachers; all have the policy's vocabulary."""

    def __post_init__(self) -> None:
        named = [source for one in self.teachers for source in one.data_sources or ("",)]
        if twice := next((source for source in named if named.count(source) > 1), None):
            raise ConfigError(
                f"algorithm.served_teachers: two teachers have the data source {twice!r}; give it to one of them"
            )
        if named.count("") > 1:
            raise ConfigError("algorithm.served_teachers: two teachers have no data_sources; name those of all but one")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingOptions:
    """The routers of a mixture of experts."""

    PART: ClassVar[str] = "a mixture of experts"

    replay: Literal["auto", "on", "off"] = "auto"
    """Whether tokens go to the experts in training that they went to when they were sampled, while the weights of these
    experts are computed anew (R3, arXiv 2510.11370). auto does so for every model with experts whose engine says where
    tokens went; on refuses a model or an engine that cannot."""
    balance_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the loss that evens out how routers use their experts (`algorithms/balance.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmOptions:
    """From rewards to a loss, whatever estimator and policy loss are taken."""

    aggregate: Annotated[AverageOptions, BeforeValidator(by_name)] = AverageOptions()
    segment_weight: Literal["per_token", "per_trajectory"] = "per_token"
    """The weight of a trajectory's segments together: that of their tokens (per_token), or that of any other trajectory
    (per_trajectory). Either way each of its tokens weighs the same, wherever the history was cut into segments."""
    loss_scale: NameOrObject = "default"
    """Which of the sampled tokens are trained: default (all turns), last_round (the last message of each sample),
    ignore_empty_think, `file.py:function`, or several as `a+b`. What a scheduler weighed itself stays."""
    kl: KlOptions | list[KlOptions] = KlOptions()
    """The KL from the weights at the start of the run, or from `model.reference`; a list for one in each place."""
    entropy_coef: float = 0.0
    """Weight of the bonus for entropy; with `entropy_target` its first value."""
    entropy_target: Annotated[float, Field(gt=0)] | None = None
    """Mean entropy per token, in nats, below which the bonus grows step by step and above which it is off; null keeps its
    weight at `entropy_coef`."""
    entropy_step: Annotated[float, Field(gt=0)] = 0.005
    """The change of the weight in one step."""
    high_entropy_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the step's trained tokens that the policy loss is computed on: those of highest entropy. 1 is all of them."""
    observation_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the cross-entropy on what tools, users and environments wrote (ECHO): its mean over the observed tokens of
    the step. The task's prompt is not an observation."""
    self_distill: SelfDistillOptions | None = None
    """Learn from the policy itself, with privileged text in its prompt; null does not."""
    served_teachers: ServedTeachersOptions | None = None
    """Learn from teachers behind endpoints; null does not."""
    routing: RoutingOptions = RoutingOptions()
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    """The denominator of the ratio where a step takes several updates or is stale: computed by the trainer before the step,
    or the engine's own, which saves a forward pass and is right where engine and trainer agree (the embedded one does)."""
    drop_truncated: bool = False
    """Leave trajectories out of the loss that a limit ended; they still count in the statistics of their group."""
    drop_zero_variance: bool | None = None
    """Leave groups out of the loss whose members all have the same reward; null does so where the estimator looks at nothing
    but rewards, so that every advantage of such a group is 0."""

    def __post_init__(self) -> None:
        places = [one.place for one in self._kl_terms]
        if len(set(places)) < len(places):
            raise ConfigError("algorithm.kl: two of them have the same place; give one for the loss and one for the reward")
        if self.entropy_target is not None and self.entropy_coef < 0:
            raise ConfigError(
                f"algorithm.entropy_target is {self.entropy_target:g} and entropy_coef {self.entropy_coef:g}, which lowers "
                "entropy; set it to 0 or more"
            )
        if self.self_distill is not None and self.served_teachers is not None:
            raise ConfigError("algorithm.self_distill and algorithm.served_teachers both change advantages; set one of them")

    def kl_in(self, where: Literal["loss", "reward"]) -> KlOptions:
        """Return the KL of the loss or of the reward, with weight 0 where there is none."""
        return next((one for one in self._kl_terms if one.place == where), KlOptions(place=where))

    @property
    def teacher(self) -> TeacherAdvantageOptions | None:
        """The options of the teacher that changes advantages; None without one."""
        return self.self_distill or self.served_teachers

    @property
    def learns_without_rewards(self) -> bool:
        """Whether a trajectory teaches something whatever the rewards of its group are."""
        return self.observation_coef > 0 or self.teacher is not None

    @property
    def has_kl(self) -> bool:
        """Whether a reference is needed."""
        return any(one.coef for one in self._kl_terms)

    @property
    def _kl_terms(self) -> list[KlOptions]:
        return self.kl if isinstance(self.kl, list) else [self.kl]
