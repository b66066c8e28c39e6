"""What can be chosen about the advantage estimator: the arguments of each of ours.

    advantage: {name: grpo, norm_by_std: false}                          GroupOptions
    advantage: {name: gae, lam: 0.95}                                    GaeOptions

A null argument is the default of the estimator's function, which alone says it. Separate from `advantages/`, whose functions
take these as keywords.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(allow_inf_nan=False)]
Outcome = Literal["rest", "add", "ignore", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorOptions:
    """How rewards become advantages: an estimator of docs/algorithms.md, or one of your own."""

    PART: ClassVar[str] = "any estimator"
    """What these are the options of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions(EstimatorOptions):
    """A reward against those of its group."""

    name: Literal["grpo"] = "grpo"
    """A registered estimator, or `file.py:function`."""
    norm_by_std: bool = True
    """Divide the group's advantages by their standard deviation; false is Dr. GRPO."""
    eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Added to what divides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAtKOptions(EstimatorOptions):
    """The best of k tries."""

    name: Literal["grpo_passk"]
    """A registered estimator, or `file.py:function`."""
    k: Annotated[int, Field(ge=1)] | None = None
    """How many tries; null is the whole group."""
    norm_by_std: bool = True
    """Divide the group's advantages by their standard deviation."""
    eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Added to what divides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainEstimatorOptions(EstimatorOptions):
    """An estimator without arguments."""

    name: Literal["dr_grpo", "rloo", "opo", "remax"]
    """A registered estimator, or `file.py:function`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineOptions(EstimatorOptions):
    """REINFORCE++ with the group's mean as a baseline."""

    name: Literal["reinforce_plus_plus_baseline"]
    """A registered estimator, or `file.py:function`."""
    eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Added to what divides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforceOptions(EstimatorOptions):
    """REINFORCE++: discounted returns, normalised over the batch."""

    name: Literal["reinforce_plus_plus"]
    """A registered estimator, or `file.py:function`."""
    gamma: Share | None = None
    """Discount of later rewards, per token."""
    outcome: Outcome | None = None
    """How the reward and the scores of turns combine."""
    eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Added to what divides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpgOptions(EstimatorOptions):
    """Group policy gradient."""

    name: Literal["gpg"]
    """A registered estimator, or `file.py:function`."""
    f_norm: Positive | None = None
    """What the differences are divided by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GdpoOptions(EstimatorOptions):
    """Each score normalised apart."""

    name: Literal["gdpo"]
    """A registered estimator, or `file.py:function`."""
    weights: Mapping[str, Weight] | None = None
    """Weight of each named score; null takes those of the reward."""
    norm_by_std: bool = True
    """Divide the group's advantages by their standard deviation."""
    whiten_batch: bool | None = None
    """Normalise the sum over the batch."""
    eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Added to what divides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GaeOptions(EstimatorOptions):
    """Generalised advantage estimation with a critic."""

    name: Literal["gae", "turn_gae"]
    """A registered estimator, or `file.py:function`."""
    gamma: Share | None = None
    """Discount of later rewards, per token or per turn as the estimator counts."""
    lam: Share | None = None
    """Weight of later steps."""
    outcome: Outcome | None = None
    """How the reward and the scores of turns combine."""
    whiten_batch: bool | None = None
    """Normalise over the step's trained tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BilevelGaeOptions(EstimatorOptions):
    """Generalised advantage estimation over turns and, within them, over tokens."""

    name: Literal["bilevel_gae"]
    """A registered estimator, or `file.py:function`."""
    gamma: Share | None = None
    """Discount of later rewards, per token."""
    lam: Share | None = None
    """Weight of later tokens."""
    turn_gamma: Share | None = None
    """Discount per turn."""
    turn_lam: Share | None = None
    """Weight of later turns."""
    outcome: Outcome | None = None
    """How the reward and the scores of turns combine."""
    whiten_batch: bool | None = None
    """Normalise over the step's trained tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnToGoOptions(EstimatorOptions):
    """The discounted scores of the turns that follow."""

    name: Literal["return_to_go"]
    """A registered estimator, or `file.py:function`."""
    gamma: Share | None = None
    """Discount per turn."""
    outcome: Outcome | None = None
    """How the reward and the scores of turns combine."""
    baseline: bool | None = None
    """Subtract the mean of the group's other members."""
    norm_by_std: bool = True
    """Divide the group's advantages by their standard deviation."""
    eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Added to what divides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MtGrpoOptions(EstimatorOptions):
    """The score of a turn and the outcome, each against the group's."""

    name: Literal["mt_grpo"]
    """A registered estimator, or `file.py:function`."""
    outcome_weight: Weight | None = None
    """Weight of the outcome beside the turn."""
    outcome: Outcome | None = None
    """How the reward and the scores of turns combine."""
    norm_by_std: bool = True
    """Divide the group's advantages by their standard deviation."""
    eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Added to what divides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GigpoOptions(EstimatorOptions):
    """Turns taken in one state against one another, beside trajectories."""

    name: Literal["gigpo"]
    """A registered estimator, or `file.py:function`."""
    step_weight: Weight | None = None
    """Weight of the comparison of turns."""
    gamma: Share | None = None
    """Discount per turn."""
    outcome: Outcome | None = None
    """How the reward and the scores of turns combine."""
    norm_by_std: bool = True
    """Divide the group's advantages by their standard deviation."""
    eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Added to what divides."""


NamedEstimatorOptions = (
    GroupOptions
    | PassAtKOptions
    | PlainEstimatorOptions
    | BaselineOptions
    | ReinforceOptions
    | GpgOptions
    | GdpoOptions
    | GaeOptions
    | BilevelGaeOptions
    | ReturnToGoOptions
    | MtGrpoOptions
    | GigpoOptions
)
"""Those of our estimators; the first of them is what a configuration without a name has."""
