"""The section `algorithm`: advantages, policy loss, KL terms.

    algorithm: {advantage: {name: gae, lam: 0.95}, loss: {clip_high: 0.28, correction: {cap: 2.0}}, kl: {coef: 0.01}}

`name` is the name of an estimator or a loss in `algorithms/`; `build` looks it up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from polyturn.algorithms.estimator_options import EstimatorOptions, GroupOptions, NamedEstimatorOptions
from polyturn.algorithms.loss_options import LossOptions, NamedLossOptions, PpoOptions
from polyturn.algorithms.options import AlgorithmOptions, CorrectionSettings, DistillSettings
from polyturn.config.parts import BY_NAME, OwnPart
from polyturn.training.options import CriticSettings


class OwnEstimator(OwnPart):
    """Your own advantage estimator. Further keys are its arguments."""

    PART: ClassVar[str] = EstimatorOptions.PART


class OwnLoss(OwnPart):
    """Your own policy loss. Further keys are its arguments."""

    PART: ClassVar[str] = LossOptions.PART

    correction: CorrectionSettings | None = None
    """Off-policy correction: weigh or reject tokens by how far the policy that sampled them is from the trained one; null
    does not."""
    distill: DistillSettings | None = None
    """Also learn from a teacher's log-probabilities; null does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig(AlgorithmOptions):
    """Advantages, policy loss and further loss terms."""

    advantage: Annotated[NamedEstimatorOptions | OwnEstimator, BY_NAME] = field(default_factory=GroupOptions)
    critic: CriticSettings = field(default_factory=CriticSettings)
    loss: Annotated[NamedLossOptions | OwnLoss, BY_NAME] = field(default_factory=PpoOptions)
