"""verl's `verl.utils.reward_score.prime_math`: (is_right, is_in_the_form, the answer that was read)."""

from __future__ import annotations

from typing import Any

from polyturn.rewards import math


def compute_score(model_output: str, ground_truth: Any) -> tuple[bool, bool, str]:
    """Return whether the stated answer is right, whether it is or its text has the steps and the box asked for, and it."""
    text = str(model_output)
    answer = math.stated_answer(text)
    is_right = math.is_near(answer, str(ground_truth))
    return is_right, is_right or ("Step 2:" in text and "\\box" in text), answer


def grade_answer(given_answer: str | None, ground_truth: str) -> bool:
    """Return whether two answers are the same mathematics, or nearly the same number."""
    return given_answer is not None and math.is_near(given_answer, str(ground_truth))
