"""The scorer of questions over documents: compares the last `<answer>…</answer>` with the right answers.

    "<answer> The Beatles. </answer>"  against  {"target": ["Beatles"]}   ->  1.0

Case, punctuation, articles and white space are ignored, as in SQuAD (Rajpurkar et al. 2016).
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
MAX_TAGS = 10
"""A right answer gets the full score only up to this number of opening or closing tags; with more, the model is guessing."""
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def compute_score(
    solution_str: Any, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Return `score` for a right answer, `format_score` for a wrong one, and 0.0 if the text has no answer.

    A right answer in a text with more than `MAX_TAGS` tags of one kind gets a quarter of `score`.

    Args:
        solution_str: The model's text; a value that is not a string has no answer.
        ground_truth: The right answer, a list of right ones, or {"target": either}.
        method: Not used; callers of this interface pass it.
        format_score: For an answer in the right form that is wrong.
        score: For a right answer.
    """
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    right = score / 4 if max(count_answer_tags(solution_str)) > MAX_TAGS else score
    return right if em_check(answer, targets(ground_truth)) else format_score


def extract_solution(solution_str: Any) -> str | None:
    """Return the content of the last `<answer>…</answer>` of a text; None if there is none."""
    answer, end = None, 0
    while isinstance(solution_str, str):
        start = solution_str.find("<answer>", end)
        end = solution_str.find("</answer>", start)
        if min(start, end) < 0:
            break
        answer, end = solution_str[start + len("<answer>") : end].strip(), end + len("</answer>")
    return answer


def count_answer_tags(text: str) -> tuple[int, int]:
    """Return the numbers of `<answer>` and of `</answer>` in a text."""
    return text.count("<answer>"), text.count("</answer>")


def em_check(prediction: str, golden_answers: Any) -> bool:
    """Return whether a prediction equals one of the right answers after normalisation."""
    return normalize_answer(prediction) in normalized(golden_answers)


def normalized(golden_answers: Any) -> set[str]:
    """Return the right answers, one or a list, after normalisation."""
    answers = [golden_answers] if isinstance(golden_answers, str) else list(golden_answers)
    return {normalize_answer(str(answer)) for answer in answers}


def targets(ground_truth: Any) -> Any:
    """Return the right answers of a row's ground truth."""
    return ground_truth["target"] if isinstance(ground_truth, Mapping) else ground_truth


def normalize_answer(s: str) -> str:
    """Return a text in lower case, without punctuation, articles and repeated white space."""
    return " ".join(_ARTICLES.sub(" ", s.lower().translate(_NO_PUNCTUATION)).split())
