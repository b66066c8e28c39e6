"""Estimators of KL(policy || reference) from log-probabilities of sampled tokens, an adaptive weight for a KL term, and the
entropy of distributions.

Source: Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html). With x sampled from the policy and
log r = ref_logprob - logprob:

    k1 = -log r              unbiased, high variance; its gradient is 0 on average, so it can measure the KL but not train
    k2 = (log r)^2 / 2       biased, low variance; on policy its gradient is the gradient of the KL
    k3 = (r - 1) - log r     unbiased, low variance, never negative; the term of GRPO's loss (Shao et al. 2024, equation 4)
    abs = |log r|            a distance, not a KL

A trailing "+" is straight-through: the value of the estimator with the gradient of k2. On policy, only k2's gradient equals
the gradient of the KL in expectation; k1's is 0, and k3's is the gradient of KL(reference || policy). So "k1+" has the
value and the gradient of the KL, as distillation from a teacher requires.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from polyturn.algorithms.losses import MAX_LOG_RATIO
from polyturn.algorithms.options import KlOptions
from polyturn.core.errors import ConfigError
from polyturn.infra.plugins import Registry

KlEstimator = Callable[[Tensor, Tensor], Tensor]
"""(logprobs_T, ref_logprobs_T) -> [T]."""

kl_estimators: Registry[KlEstimator] = Registry("kl")


@kl_estimators.register("k1")
def k1(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Return [T] logprob - ref_logprob."""
    return logprobs_T - ref_logprobs_T


@kl_estimators.register("k2")
def k2(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Return [T] half the squared difference."""
    return 0.5 * (logprobs_T - ref_logprobs_T).square()


@kl_estimators.register("k3")
def k3(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Return [T] (r - 1) - log r with r = ref probability / probability."""
    # Not clamped below: there exp cannot overflow, and the gradient must move the policy back towards the reference.
    log_r_T = (ref_logprobs_T - logprobs_T).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(log_r_T) - log_r_T


@kl_estimators.register("abs")
def absolute(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Return [T] the absolute difference."""
    return (logprobs_T - ref_logprobs_T).abs()


def straight_through(value: KlEstimator) -> KlEstimator:
    """Return an estimator with the value of `value` and the gradient of k2."""

    def estimate(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
        # The two terms with `through_T` add up to 0, but only the first one has a gradient: k2's.
        through_T = k2(logprobs_T, ref_logprobs_T)
        return value(logprobs_T, ref_logprobs_T).detach() + through_T - through_T.detach()

    return estimate


for _name, _estimator in (("k1", k1), ("k3", k3), ("abs", absolute)):
    kl_estimators.register(f"{_name}+")(straight_through(_estimator))


class KlController:
    """The weight of a KL term over a run: constant, or adapted to keep the KL near a target.

    After a step of n trajectories: coef <- coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon). So if the KL stays a
    fifth or more above (below) the target, the weight grows (falls) by about a fifth per `horizon` trajectories. Source:
    Ziegler et al. 2019 (Fine-Tuning Language Models from Human Preferences), section 2.2.
    """

    def __init__(self, options: KlOptions) -> None:
        """Start with the weight of `options`.

        Raises:
            ConfigError: there is a target, and the weight, target or horizon is not above 0.
        """
        if options.target is not None and not (options.coef > 0 and options.target > 0 and options.horizon > 0):
            raise ConfigError(
                f"an adaptive KL weight needs a start ({options.coef}), a target ({options.target}) and a horizon "
                f"({options.horizon}) above 0"
            )
        self.coef = options.coef
        """The current weight."""
        self._target, self._horizon = options.target, options.horizon

    def update(self, kl: float, *, num_trajectories: int) -> None:
        """Adapt the weight to the mean KL per token of one step, in nats, measured on `num_trajectories`."""
        if self._target is not None:
            error = min(max(kl / self._target - 1.0, -0.2), 0.2)  # bounded, so that an outlier changes the weight little
            self.coef *= 1.0 + error * num_trajectories / self._horizon

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the current weight, or {} if the weight is constant."""
        return {} if self._target is None else {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the weight from `state`. Keep the configured weight if it is constant or `state` has none."""
        if self._target is not None:
            self.coef = float(state.get("coef", self.coef))


def entropy(log_softmax_SV: Tensor) -> Tensor:
    """Return [S] the entropy in nats of each distribution, given the log-probabilities of the whole vocabulary."""
    return -(log_softmax_SV.exp() * log_softmax_SV).sum(-1)
