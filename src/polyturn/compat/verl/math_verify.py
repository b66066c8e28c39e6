"""verl's `verl.utils.reward_score.math_verify`: compares a boxed answer mathematically, with verl's parameter names."""

from __future__ import annotations

from typing import Any

from polyturn.rewards import math


def compute_score(model_output: str, ground_truth: Any, timeout_score: float = 0.0, timeout: float = 30.0) -> float:
    r"""Return 1.0 if the last `\boxed{…}` is the right answer, else 0.0; a comparison that times out counts as wrong."""
    return math.compute_score(model_output, ground_truth)
