"""Options of the policy losses: the arguments of each of ours, and those of any loss.

    loss: {name: ppo_clip, clip_high: 0.28, correction: {cap: 2.0}}      PpoOptions
    loss: {name: sapo, tau_neg: 1.1}                                     SapoOptions

A null argument takes the default of the loss's function. Separate from `losses/`, because a configuration is also read
without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from polyturn.algorithms.options import CorrectionSettings, DistillSettings
from polyturn.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """The policy loss of a token, by its name."""

    PART: ClassVar[str] = "any loss"
    """The name of the part in messages."""

    correction: CorrectionSettings | None = None
    """Weigh and reject tokens by how far the engine that sampled them was from the policy that is trained; null does not."""
    distill: DistillSettings | None = None
    """Learn from a teacher's log-probabilities, beside the loss; null does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioOptions(LossOptions):
    """A loss whose ratio is clipped."""

    clip_low: Annotated[float, Field(ge=0, allow_inf_nan=True)] | None = None
    """The ratio is clipped below 1 - clip_low; null takes the loss's own bound, 0.2 for ppo_clip."""
    clip_high: Annotated[float, Field(ge=0, allow_inf_nan=True)] | None = None
    """The ratio is clipped above 1 + clip_high; null takes the loss's own bound, 0.28 for ppo_clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipOptions(RatioOptions):
    """A loss with these two arguments alone."""

    name: Literal["cispo", "gspo", "gspo_sequence", "luspo", "geo_mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoOptions(RatioOptions):
    """The clipped loss of PPO."""

    name: Literal["ppo_clip", "dapo"] = "ppo_clip"
    """A registered policy loss, or `file.py:function`."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=True)] | None = None
    """Bound of the loss at negative advantages, as a multiple of them; null is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCovOptions(RatioOptions):
    """PPO that leaves out tokens of large covariance."""

    name: Literal["clip_cov"]
    clip_cov_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """The share of all tokens that is left out, drawn from those between the two bounds."""
    clip_cov_lb: float | None = None
    """The lower bound of their covariance."""
    clip_cov_ub: float | None = None
    """The upper bound of it."""

    def __post_init__(self) -> None:
        low, high = self.clip_cov_lb, self.clip_cov_ub
        if low is not None and high is not None and not low < high:
            raise ConfigError(f"clip_cov_lb is {low:g} and clip_cov_ub {high:g}; nothing lies between them")


@dataclass(frozen=True, slots=True, kw_only=True)
class KlCovOptions(LossOptions):
    """A KL penalty on tokens of the largest covariance."""

    name: Literal["kl_cov"]
    kl_cov_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """The share of all tokens that is penalised."""
    ppo_kl_coef: Annotated[float, Field(ge=0)] | None = None
    """Weight of the penalty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SapoOptions(LossOptions):
    """The soft gate of SAPO."""

    name: Literal["sapo"]
    tau_pos: Annotated[float, Field(gt=0)] | None = None
    """The slope of the gate for tokens to be made likelier."""
    tau_neg: Annotated[float, Field(gt=0)] | None = None
    """The same for tokens to be made less likely; above tau_pos for stability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DppoOptions(LossOptions):
    """A bound on how far the probability of a token may move."""

    name: Literal["dppo_tv", "dppo_kl"]
    clip_low: Annotated[float, Field(ge=0, allow_inf_nan=True)] | None = None
    """How far it may fall: a difference of probabilities (dppo_tv) or a divergence in nats (dppo_kl); null takes 0.2."""
    clip_high: Annotated[float, Field(ge=0, allow_inf_nan=True)] | None = None
    """How far it may rise; null takes 0.28."""
    cap: Annotated[float, Field(gt=0, allow_inf_nan=True)] | None = None
    """Bound of the importance weight; null takes 20."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VespoOptions(LossOptions):
    """The smooth weight of VESPO."""

    name: Literal["vespo"]
    k_pos: Annotated[float, Field(ge=0)] | None = None
    """Exponent of the sequence's ratio where the advantage is not negative; null takes 2."""
    lambda_pos: Annotated[float, Field(ge=1e-4)] | None = None
    """Decay there; null takes 3."""
    k_neg: Annotated[float, Field(ge=0)] | None = None
    """Exponent where the advantage is negative; null takes 3."""
    lambda_neg: Annotated[float, Field(ge=1e-4)] | None = None
    """Decay there; null takes 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DroOptions(LossOptions):
    """A square in place of a clip."""

    name: Literal["dro"]
    dro_beta: Annotated[float, Field(gt=0)] | None = None
    """Weight of the square of the log ratio; null takes 0.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainLossOptions(LossOptions):
    """A loss without arguments; `none` leaves that of a teacher, or none at all."""

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
"""Those of our losses; the first of them is what a configuration without a name has."""
