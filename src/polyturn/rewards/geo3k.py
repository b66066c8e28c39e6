r"""The Geometry3k scorer: 0.9 for the right answer in `\boxed{…}`, 0.1 for the form `<think>…</think> … \boxed{…}`.

"<think>Two angles …</think> So x is \boxed{30}."  against  "30"   ->  1.0
"""

from __future__ import annotations

from typing import Any

from polyturn.rewards import math


def compute_score(predict_str: Any, ground_truth: Any, use_boxed: bool = True, format_score: float = 0.1) -> float:
    r"""Return (1 - format_score) x accuracy + format_score x form.

    Args:
        predict_str: The text of the model.
        ground_truth: The right answer.
        use_boxed: Whether the answer is the content of the last `\boxed{…}`; if not, the whole text is the answer.
        format_score: The share of the score for the form.
    """
    text = predict_str if isinstance(predict_str, str) else ""
    return (1.0 - format_score) * acc_reward(text, ground_truth, use_boxed) + format_score * format_reward(text)


def format_reward(predict_str: str) -> float:
    r"""Return 1.0 if the text begins with reasoning in `<think>` tags and has `\boxed{…}` after it, else 0.0."""
    text = predict_str.strip()
    boxed = text.find("\\boxed{", max(text.find("</think>"), 0))
    return float(text.startswith("<think>") and "</think>" in text and boxed >= 0 and "}" in text[boxed:])


def acc_reward(predict_str: str, ground_truth: Any, use_boxed: bool = True) -> float:
    """Return 1.0 if the answer is right, else 0.0."""
    answer = math.last_boxed(predict_str) if use_boxed else predict_str.strip()
    return float(bool(answer) and math.is_equal(str(answer), str(ground_truth)))
