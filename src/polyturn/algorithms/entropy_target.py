"""The weight of the entropy bonus over a run: fixed, or adapted to keep the entropy above a target.

    c_{k+1} = max(0, c_k + step)  if entropy_k < target,  else  max(0, c_k - step)
    weight_{k+1} = c_{k+1}        if entropy_k <= target, else  0

entropy_k is the mean entropy of step k at the trained tokens, in nats; c_0 is `entropy_coef`. Source: He et al. 2025
(Skywork-OR1, adaptive entropy control). The paper does not bound c at 0. The bound ensures that the bonus returns in the
first step whose entropy is below the target, however long the entropy was above it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyturn.algorithms.options import AlgorithmOptions


class EntropyController:
    """The weight of the entropy bonus."""

    def __init__(self, options: AlgorithmOptions) -> None:
        """Begin with `entropy_coef`."""
        self._coef, self._target, self._step = options.entropy_coef, options.entropy_target, options.entropy_step
        self._is_above = False

    @property
    def coef(self) -> float:
        """The current weight."""
        return 0.0 if self._is_above else self._coef

    def update(self, entropy: float) -> None:
        """Adapt the weight to the mean entropy per token of one step, in nats."""
        if self._target is not None:
            self._is_above = entropy > self._target
            self._coef = max(0.0, self._coef + (self._step if entropy < self._target else -self._step))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: c and whether the entropy is above the target; {} if there is no target."""
        return {} if self._target is None else {"coef": self._coef, "is_above": self._is_above}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the weight from `state`. Keep the configured weight if there is no target or `state` has no weight."""
        if self._target is not None:
            self._coef = float(state.get("coef", self._coef))
            self._is_above = bool(state.get("is_above", False))
