"""Options of the advantage estimators: the arguments of each built-in one.

    advantage: {name: grpo, norm_by_std: false}                          GroupOptions
    advantage: {name: gae, lam: 0.95}                                    GaeOptions

A null argument takes the default of the estimator's function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Outcome = Literal["rest", "add", "ignore", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorOptions:
    """The advantage estimator: one of docs/algorithms.md, or your own."""

    PART: ClassVar[str] = "any estimator"
    """The name of the part in messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedOptions(EstimatorOptions):
    """An estimator that divides by a spread."""

    eps: Annotated[float, Field(ge=0)] | None = None
    """Added to the divisor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormOptions(DividedOptions):
    """An estimator that may divide by the standard deviation of a group."""

    norm_by_std: bool = True
    """Divide the group's advantages by their standard deviation; false makes grpo Dr. GRPO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions(NormOptions):
    """Compares a reward with those of its group."""

    name: Literal["grpo"] = "grpo"
    """A registered estimator, or `file.py:function`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAtKOptions(NormOptions):
    """Rewards the best of k tries."""

    name: Literal["grpo_passk"]
    k: Annotated[int, Field(ge=1)] | None = None
    """Number of tries; null is the whole group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainEstimatorOptions(EstimatorOptions):
    """An estimator without arguments."""

    name: Literal["dr_grpo", "rloo", "opo", "remax"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxRlOptions(DividedOptions):
    """Divides rewards by the group's mean, which maximises log success instead of success."""

    name: Literal["maxrl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineOptions(DividedOptions):
    """REINFORCE++ with the group's mean as a baseline."""

    name: Literal["reinforce_plus_plus_baseline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforceOptions(DividedOptions):
    """REINFORCE++: discounted returns, normalised over the batch."""

    name: Literal["reinforce_plus_plus"]
    gamma: Share | None = None
    """Discount of later rewards, per token."""
    outcome: Outcome | None = None
    """The combination of the reward and the scores of turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpgOptions(EstimatorOptions):
    """Group policy gradient."""

    name: Literal["gpg"]
    f_norm: Positive | None = None
    """The divisor of the differences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaeOptions(EstimatorOptions):
    """Compares a reward with the running mean of its data source and agent."""

    name: Literal["rae"]
    decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Weight of the old mean when rewards are added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchicalGrpoOptions(EstimatorOptions):
    """Compares a reward with those of agents that did the same work."""

    name: Literal["hierarchical_grpo"]
    within: tuple[str, ...] | None = None
    """Names of agents, with wildcards, that are compared within their trajectory; null takes solver*."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GdpoOptions(NormOptions):
    """Normalises each score by itself."""

    name: Literal["gdpo"]
    weights: Mapping[str, float] | None = None
    """Weight of each named score; null takes those of the reward."""
    whiten_batch: bool | None = None
    """Normalise the sum over the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOptions(EstimatorOptions):
    """An estimator that reads a critic's values."""

    gamma: Share | None = None
    """Discount of later rewards, per token; for turn_gae per turn."""
    lam: Share | None = None
    """Weight of later steps, per token or turn like `gamma`."""
    outcome: Outcome | None = None
    """The combination of the reward and the scores of turns."""
    whiten_batch: bool | None = None
    """Normalise over the step's trained tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GaeOptions(ValueOptions):
    """Generalised advantage estimation with a critic."""

    name: Literal["gae", "turn_gae"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BilevelGaeOptions(ValueOptions):
    """Generalised advantage estimation over turns and, within them, over tokens."""

    name: Literal["bilevel_gae"]
    turn_gamma: Share | None = None
    """Discount per turn."""
    turn_lam: Share | None = None
    """Weight of later turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOptions(NormOptions):
    """An estimator that reads scores of turns."""

    outcome: Outcome | None = None
    """The combination of the reward and the scores of turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnToGoOptions(TurnOptions):
    """Credits a turn with the discounted scores from it on."""

    name: Literal["return_to_go"]
    norm_by_std: bool = False
    """Divide the group's advantages by their standard deviation, which biases them."""
    gamma: Share | None = None
    """Discount per turn."""
    baseline: bool | None = None
    """Subtract the mean of the group's other members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MtGrpoOptions(TurnOptions):
    """Compares the score of a turn, and the outcome, with those of the group."""

    name: Literal["mt_grpo"]
    outcome_weight: float | None = None
    """Weight of the outcome relative to the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GigpoOptions(TurnOptions):
    """Compares trajectories, and turns taken in the same state."""

    name: Literal["gigpo"]
    step_weight: float | None = None
    """Weight of the comparison of turns."""
    gamma: Share | None = None
    """Discount per turn."""


NamedEstimatorOptions = (
    GroupOptions
    | PassAtKOptions
    | PlainEstimatorOptions
    | MaxRlOptions
    | BaselineOptions
    | ReinforceOptions
    | GpgOptions
    | RaeOptions
    | HierarchicalGrpoOptions
    | GdpoOptions
    | GaeOptions
    | BilevelGaeOptions
    | ReturnToGoOptions
    | MtGrpoOptions
    | GigpoOptions
)
"""Options of the shipped estimators; a configuration without a name gets the first."""
