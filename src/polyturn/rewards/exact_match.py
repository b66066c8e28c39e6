"""The exact-match scorer: is the text one of the right answers? Case, white space and a final full stop are ignored.

compute_score(" Paris. ", ["paris", "Paris, France"])  ->  1.0
"""

from __future__ import annotations

from typing import Any


def compute_score(solution_str: Any, ground_truth: Any) -> float:
    """Return 1.0 if the text is the right answer, or one of a list of right answers; else 0.0."""
    if not isinstance(solution_str, str):
        return 0.0
    answers = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    return float(_plain(solution_str) in {_plain(str(a)) for a in answers})


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).removesuffix(".")
