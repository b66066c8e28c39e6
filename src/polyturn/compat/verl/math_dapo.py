r"""verl.utils.reward_score.math_dapo: the scorer, and its parts for users' own scorers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from polyturn.compat.verl.math_reward import last_boxed_only_string, remove_boxed
from polyturn.rewards.math import last_boxed
from polyturn.rewards.math_dapo import ANSWER, INVALID, compute_score, normalize_final_answer

__all__ = [
    "compute_score", "is_correct_minerva", "is_correct_strict_box", "last_boxed_only_string", "normalize_final_answer",
    "remove_boxed", "verify",
]  # fmt: skip

_STRICT_CHARS = 100


def is_correct_minerva(
    solution_str: str, gt: str, gt_need_extract: bool = False, answer_pattern: str = ANSWER
) -> tuple[bool, str]:
    """Return whether the text after the last `Answer:` is right, and the text; the ground truth may be boxed."""
    matches = re.findall(answer_pattern, solution_str)
    answer = normalize_final_answer(matches[-1]) if matches else INVALID
    truth = normalize_final_answer((last_boxed(gt) or INVALID) if gt_need_extract else str(gt))
    return answer == truth, answer


def is_correct_strict_box(pred: str, gt: str, pause_tokens_index: Sequence[int] | None = None) -> tuple[int, str | None]:
    """Return 1 if the last box holds `gt`, else -1, and the box's content.

    The box is searched in the last 100 characters, or from 100 characters before the last of `pause_tokens_index` on.
    """
    start = -_STRICT_CHARS if pause_tokens_index is None else pause_tokens_index[-1] - _STRICT_CHARS
    answer = last_boxed(pred[start:])
    return 1 if answer == gt else -1, answer


def verify(
    solution_str: str, answer: str, strict_box_verify: bool = False, pause_tokens_index: Sequence[int] | None = None
) -> tuple[bool, str | None]:
    """Return whether a solution is right, and the parsed answer."""
    if strict_box_verify:
        score, prediction = is_correct_strict_box(solution_str, answer, pause_tokens_index)
        return score == 1, prediction
    return is_correct_minerva(solution_str, answer)
