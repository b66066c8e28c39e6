"""verl.utils.reward_score.search_r1_like_qa_em: the native scorer, and one for answers that contain a right answer."""

from __future__ import annotations

from typing import Any

from polyturn.rewards.search_r1 import extract_solution, normalize_answer, normalized, targets


def compute_score_subem(
    solution_str: Any, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Return `score` if the answer contains a right answer, `format_score` for another answer, else 0.0."""
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    return score if subem_check(answer, targets(ground_truth)) else format_score


def subem_check(prediction: str, golden_answers: Any) -> bool:
    """Return whether a prediction contains one of the right answers after normalisation."""
    whole = normalize_answer(prediction)
    return any(answer in whole for answer in normalized(golden_answers))
