"""The section `algorithm`: from rewards to a loss. Credit, policy loss, KL terms.

    algorithm: {advantage: {name: gae, lam: 0.95}, loss: {clip_high: 0.28, correction: {cap: 2.0}}, kl: {coef: 0.01}}

Names are those of the estimators and losses in `algorithms/`; `build` looks them up.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import field_validator

from polyturn.algorithms.estimator_options import EstimatorOptions, GroupOptions, NamedEstimatorOptions
from polyturn.algorithms.loss_options import LossOptions, NamedLossOptions, PpoOptions
from polyturn.algorithms.options import AverageOptions, CorrectionSettings, DistillSettings, KlOptions
from polyturn.config.models.base import Section
from polyturn.config.parts import BY_NAME, OwnPart
from polyturn.training.options import CriticSettings, RoutingOptions


class OwnEstimator(OwnPart):
    """How rewards become advantages: an estimator of your own. Further keys are its arguments."""

    PART: ClassVar[str] = EstimatorOptions.PART


class OwnLoss(OwnPart):
    """What a token contributes: a policy loss of your own. Further keys are its arguments."""

    PART: ClassVar[str] = LossOptions.PART

    correction: CorrectionSettings | None = None
    """Weigh and reject tokens by how far the engine that sampled them was from the policy that is trained; null does not."""
    distill: DistillSettings | None = None
    """Learn from a teacher's log-probabilities, beside the loss; null does not."""


class AlgorithmConfig(Section):
    """From rewards to a loss."""

    advantage: Annotated[NamedEstimatorOptions | OwnEstimator, BY_NAME] = GroupOptions()
    critic: CriticSettings = CriticSettings()
    loss: Annotated[NamedLossOptions | OwnLoss, BY_NAME] = PpoOptions()
    aggregate: Annotated[AverageOptions, BY_NAME] = AverageOptions()
    segment_weight: Literal["per_token", "per_trajectory"] = "per_token"
    """How much a trajectory's segments weigh together: as its tokens do (per_token), or as much as any other trajectory
    (per_trajectory). Either way each of its tokens weighs the same, wherever the history was cut into segments."""
    loss_scale: str = "default"
    """Which of the sampled tokens are trained: default (all turns), last_round (the last message of each sample),
    ignore_empty_think, `file.py:function`, or several as `a+b`. What a scheduler weighed itself stays."""
    kl: KlOptions | list[KlOptions] = KlOptions()
    """The KL from the weights at the start of the run, or from `model.reference`; a list for one in each place."""
    entropy_coef: float = 0.0
    """Weight of the bonus for entropy."""
    routing: RoutingOptions = RoutingOptions()
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    """The denominator of the ratio where a step takes several updates or is stale: computed by the trainer before the step,
    or the engine's own, which saves a forward pass and is right where engine and trainer agree (the embedded one does)."""
    drop_truncated: bool = False
    """Leave trajectories out of the loss that a limit ended; they still count in the statistics of their group."""
    drop_zero_variance: bool | None = None
    """Leave groups out of the loss whose members all have the same reward; null does so where the estimator looks at nothing
    but rewards, so that every advantage of such a group is 0."""

    @field_validator("kl")
    @classmethod
    def _one_in_each_place(cls, kl: KlOptions | list[KlOptions]) -> KlOptions | list[KlOptions]:
        if isinstance(kl, list) and len({one.place for one in kl}) < len(kl):
            raise ValueError("two of them have the same place; give one for the loss and one for the reward")
        return kl

    def kl_in(self, place: Literal["loss", "reward"]) -> KlOptions:
        """Return the KL of the loss or of the reward, with weight 0 where there is none."""
        return next((one for one in self._kl_terms if one.place == place), KlOptions(place=place))

    @property
    def has_kl(self) -> bool:
        """Whether a reference is needed."""
        return any(one.coef for one in self._kl_terms)

    @property
    def _kl_terms(self) -> list[KlOptions]:
        return self.kl if isinstance(self.kl, list) else [self.kl]
