"""verl's `verl.utils.reward_score.prime_math`: returns (is_right, has_format, parsed answer)."""

from __future__ import annotations

from typing import Any

from polyturn.rewards import math


def compute_score(model_output: str, ground_truth: Any) -> tuple[bool, bool, str]:
    """Return (whether the answer is right, whether it is right or the text has the required format, the answer)."""
    text = str(model_output)
    answer = math.stated_answer(text)
    is_right = math.is_near(answer, str(ground_truth))
    return is_right, is_right or ("Step 2:" in text and "\\box" in text), answer


def grade_answer(given_answer: str | None, ground_truth: str) -> bool:
    """Return whether two answers are mathematically equal, or nearly equal numbers."""
    return given_answer is not None and math.is_near(given_answer, str(ground_truth))
