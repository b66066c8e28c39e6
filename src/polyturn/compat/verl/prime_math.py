"""verl's `verl.utils.reward_score.prime_math`: (is_right, is_in_the_form, the answer that was read)."""

from __future__ import annotations

from typing import Any

from polyturn.rewards import math


def compute_score(model_output: str, ground_truth: Any) -> tuple[bool, bool, str]:
    r"""Return whether the last `\boxed{…}` is the right answer, whether there is one, and what stands in it."""
    answer = math.last_boxed(str(model_output))
    return answer is not None and math.is_equal(answer, str(ground_truth)), answer is not None, answer or ""


def grade_answer(given_answer: str | None, ground_truth: str) -> bool:
    """Return whether two answers are the same mathematics."""
    return given_answer is not None and math.is_equal(given_answer, str(ground_truth))
