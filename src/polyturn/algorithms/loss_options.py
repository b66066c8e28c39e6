"""Options of the policy losses: the arguments of each built-in one, and options of any loss.

    loss: {name: ppo_clip, clip_high: 0.28, correction: {cap: 2.0}}      PpoOptions
    loss: {name: sapo, tau_neg: 1.1}                                     SapoOptions

A null argument takes the default of the loss's function. This module does not import torch, because configurations are also
read without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from polyturn.algorithms.options import CorrectionSettings, DistillSettings
from polyturn.core.errors import ConfigError

CLIP_COV_LB, CLIP_COV_UB = 1.0, 5.0
"""Default bounds of the covariance of tokens that `clip_cov` leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """The policy loss."""

    PART: ClassVar[str] = "any loss"
    """The name of the part in messages."""

    correction: CorrectionSettings | None = None
    """Off-policy correction: weigh or reject tokens by how far the policy that sampled them is from the trained one; null
    does not."""
    distill: DistillSettings | None = None
    """Also learn from a teacher's log-probabilities; null does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioOptions(LossOptions):
    """A loss whose ratio is clipped."""

    clip_low: Annotated[float, Field(ge=0, allow_inf_nan=True)] | None = None
    """The ratio is clipped below 1 - clip_low; null takes the loss's own bound, 0.2 for ppo_clip."""
    clip_high: Annotated[float, Field(ge=0, allow_inf_nan=True)] | None = None
    """The ratio is clipped above 1 + clip_high; null takes the loss's own bound, 0.28 for ppo_clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipOptions(RatioOptions):
    """A loss with only these two arguments."""

    name: Literal["cispo", "gspo", "gspo_sequence", "luspo", "geo_mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoOptions(RatioOptions):
    """The clipped loss of PPO."""

    name: Literal["ppo_clip", "dapo"] = "ppo_clip"
    """A registered policy loss, or `file.py:function`."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=True)] | None = None
    """Bound of the loss for negative advantages, as a multiple of the advantage; null sets no bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCovOptions(RatioOptions):
    """PPO that leaves out tokens of large covariance."""

    name: Literal["clip_cov"]
    clip_cov_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of all tokens to leave out, drawn from those between the two bounds."""
    clip_cov_lb: float | None = None
    """Lower bound of the covariance of a token that may be left out."""
    clip_cov_ub: float | None = None
    """Upper bound of that covariance."""

    def __post_init__(self) -> None:
        low = CLIP_COV_LB if self.clip_cov_lb is None else self.clip_cov_lb
        high = CLIP_COV_UB if self.clip_cov_ub is None else self.clip_cov_ub
        if not low < high:
            raise ConfigError(
                f"clip_cov_lb is {low:g} and clip_cov_ub is {high:g}; the lower bound must be below the upper one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class KlCovOptions(LossOptions):
    """Penalises the tokens of largest covariance by their KL."""

    name: Literal["kl_cov"]
    kl_cov_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of all tokens to penalise."""
    ppo_kl_coef: Annotated[float, Field(ge=0)] | None = None
    """Weight of the penalty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SapoOptions(LossOptions):
    """The soft gate of SAPO."""

    name: Literal["sapo"]
    tau_pos: Annotated[float, Field(gt=0)] | None = None
    """Slope of the gate for tokens of positive advantage."""
    tau_neg: Annotated[float, Field(gt=0)] | None = None
    """Slope of the gate for the other tokens; larger than tau_pos for stability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DppoOptions(LossOptions):
    """Bounds how far the probability of a token may move."""

    name: Literal["dppo_tv", "dppo_kl"]
    clip_low: Annotated[float, Field(ge=0, allow_inf_nan=True)] | None = None
    """How far the probability may fall: a difference of probabilities (dppo_tv) or a divergence in nats (dppo_kl); null
    takes 0.2."""
    clip_high: Annotated[float, Field(ge=0, allow_inf_nan=True)] | None = None
    """How far the probability may rise; null takes 0.28."""
    cap: Annotated[float, Field(gt=0, allow_inf_nan=True)] | None = None
    """Bound of the importance weight; null takes 20."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VespoOptions(LossOptions):
    """The smooth weight of VESPO."""

    name: Literal["vespo"]
    k_pos: Annotated[float, Field(ge=0)] | None = None
    """Exponent of the sequence's ratio for advantages of 0 and above; null takes 2."""
    lambda_pos: Annotated[float, Field(ge=1e-4)] | None = None
    """Decay for advantages of 0 and above; null takes 3."""
    k_neg: Annotated[float, Field(ge=0)] | None = None
    """Exponent for negative advantages; null takes 3."""
    lambda_neg: Annotated[float, Field(ge=1e-4)] | None = None
    """Decay for negative advantages; null takes 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DroOptions(LossOptions):
    """Penalises the square of the log ratio instead of clipping."""

    name: Literal["dro"]
    dro_beta: Annotated[float, Field(gt=0)] | None = None
    """Weight of the square of the log ratio; null takes 0.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainLossOptions(LossOptions):
    """A loss without arguments; `none` trains on the other terms only, such as a teacher's."""

    name: Literal["policy_gradient", "gpg", "none"]


NamedLossOptions = (
    PpoOptions
    | ClipOptions
    | ClipCovOptions
    | KlCovOptions
    | SapoOptions
    | DppoOptions
    | VespoOptions
    | DroOptions
    | PlainLossOptions
)
"""Options of the built-in losses; a configuration without a name gets the first."""
