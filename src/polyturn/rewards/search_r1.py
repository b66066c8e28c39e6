"""The scorer of questions over documents: the last `<answer>…</answer>` is a right answer, up to how it is written.

    "<answer> The Beatles. </answer>"  against  {"target": ["Beatles"]}   ->  1.0

Written differently means case, punctuation, articles and white space, as in SQuAD (Rajpurkar et al. 2016).
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def compute_score(
    solution_str: Any, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Return `score` for a right answer, `format_score` for another one, 0.0 where there is none.

    Args:
        solution_str: What the model wrote.
        ground_truth: The right answer, a list of right ones, or {"target": either}.
        method: Not used; callers of this interface pass it.
        format_score: For an answer in the right form that is wrong.
        score: For a right answer.
    """
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    targets = ground_truth["target"] if isinstance(ground_truth, Mapping) else ground_truth
    return score if em_check(answer, targets) else format_score


def extract_solution(solution_str: Any) -> str | None:
    """Return what stands in the last `<answer>` of a text; None if nothing does."""
    if not isinstance(solution_str, str) or (end := solution_str.rfind("</answer>")) < 0:
        return None
    start = solution_str.rfind("<answer>", 0, end)
    return None if start < 0 else solution_str[start + len("<answer>") : end].strip()


def em_check(prediction: str, golden_answers: Any) -> bool:
    """Return whether a prediction is one of the right answers, up to how it is written."""
    answers = [golden_answers] if isinstance(golden_answers, str) else list(golden_answers)
    return normalize_answer(prediction) in {normalize_answer(str(a)) for a in answers}


def normalize_answer(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and repeated white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())
