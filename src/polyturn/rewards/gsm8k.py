"""The GSM8K scorer: find the final answer in a text and compare it with the right one.

    strict    "... so #### 1,234"      -> "1234"    the last `#### N`, commas removed
    flexible  "... it costs 1,234 now" -> "1,234"   the last run of digits, commas and full stops; commas kept

Only the last 300 characters are searched, so that the time is bounded for any text. A full stop directly after the number
belongs to it ("#### 72." gives "72."), as users of this format expect.
"""

from __future__ import annotations

import re
from typing import Any

from polyturn.core.errors import ConfigError

SEARCHED_CHARS = 300
"""Number of characters at the end of a text that are searched."""
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[0-9.,]+")


def extract_solution(solution_str: Any, method: str = "strict") -> str | None:
    """Return the final answer in a text; None if there is none, or if `solution_str` is not a string.

    Raises:
        ConfigError: `method` is neither "strict" nor "flexible".
    """
    if method not in ("strict", "flexible"):
        raise ConfigError(f"gsm8k: method is {method!r}; use 'strict' or 'flexible'")
    if not isinstance(solution_str, str):
        return None
    end = solution_str[-SEARCHED_CHARS:]
    if method == "strict":
        answers = _STRICT.findall(end)
        return answers[-1].replace(",", "") if answers else None
    runs = _FLEXIBLE.findall(end)
    return next((run for run in reversed(runs) if run != "."), runs[0] if runs else None)


def compute_score(
    solution_str: Any, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Return `score` for the right answer, `format_score` for a wrong one, and 0 if the text has no answer.

    Args:
        solution_str: The model's text; a value that is not a string has no answer.
        ground_truth: The right answer, compared as text.
        method: "strict" or "flexible".
        format_score: For an answer in the right form that is wrong.
        score: For the right answer.
    """
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0  # an integer, because code that prints the score expects "0"
    return score if answer == str(ground_truth) else format_score
