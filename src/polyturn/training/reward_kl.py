"""KL in the reward: penalise each trained token by its KL to the reference, before advantages are computed.

r_t = -coef * kl(logprob_t, ref_logprob_t), added to `TrainSample.rewards`. Unlike a KL term in the loss, the penalty is
credited to earlier tokens like any other reward. Source: Ziegler et al. 2019 (Fine-Tuning Language Models from Human
Preferences), equation 2; Ouyang et al. 2022.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from polyturn.algorithms.kl import KlController, kl_estimators
from polyturn.algorithms.options import KlOptions
from polyturn.core.arrays import Floats
from polyturn.core.errors import TrainingError
from polyturn.core.metrics import Mean, Metrics
from polyturn.core.sample import TrainSample


class RewardKl:
    """Subtracts a KL penalty from the rewards of tokens, with a constant or adaptive weight."""

    def __init__(self, options: KlOptions) -> None:
        """Use the estimator, weight and target of `options`."""
        self._controller = KlController(options)
        self._estimate = kl_estimators.resolve(options.name)
        self._measured: tuple[float, int] | None = None
        """Mean KL per token of the last `apply`, in nats, and its number of trajectories; None after `adapt`."""

    @property
    def coef(self) -> float:
        """The weight now."""
        return self._controller.coef

    def apply(self, samples: Sequence[TrainSample]) -> tuple[list[TrainSample], Metrics]:
        """Return the samples with the penalty in their `rewards`, and metrics.

        Raises:
            TrainingError: samples lack log-probabilities.
        """
        coef, kl_sum, num_tokens = self.coef, 0.0, 0
        out = []
        for sample in samples:
            kl_T = self._kl(sample)
            kl_sum += float(kl_T.sum())
            num_tokens += sample.num_weighted
            penalty_T = (-coef * kl_T).astype(np.float32)  # [T], 0 at tokens that are not trained
            out.append(sample.replace(rewards=penalty_T if sample.rewards is None else sample.rewards + penalty_T))
        trajectories = {(s.id.group, s.id.trajectory) for s in samples if s.num_weighted}
        self._measured = (kl_sum / num_tokens, len(trajectories)) if num_tokens else None
        return out, {"policy/kl_in_reward": Mean(kl_sum, num_tokens), "policy/kl_in_reward_coef": Mean(coef)}

    def adapt(self) -> None:
        """Adapt the weight to the KL from `apply`. Called once per step, although `apply` may run several times."""
        if self._measured is not None:
            kl, num_trajectories = self._measured
            self._controller.update(kl, num_trajectories=num_trajectories)
            self._measured = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return self._controller.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self._controller.load_state_dict(state)

    def _kl(self, sample: TrainSample) -> Floats:
        if sample.old_logprobs is None or sample.ref_logprobs is None:
            raise TrainingError(f"sample {sample.id} has no log-probabilities of the policy and the reference to compare")
        # Copies, because a sample's arrays are read-only, which torch tensors do not support.
        kl_T: Floats = self._estimate(
            torch.from_numpy(sample.old_logprobs.copy()), torch.from_numpy(sample.ref_logprobs.copy())
        ).numpy()
        return np.where(sample.loss_weights != 0, kl_T, np.float32(0.0))
