"""verl.utils.reward_score.math_reward, beside the native scorer: its parts for users' own scorers."""

from __future__ import annotations

from polyturn.rewards.math import is_equal, last_boxed


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last box with its mark, as `\boxed{7}`, for code that takes boxes apart in two steps."""
    answer = last_boxed(string)
    return None if answer is None else rf"\boxed{{{answer}}}"


def remove_boxed(s: str) -> str:
    r"""Return the content of the box that a text ends with, or the text itself if it ends with none."""
    return last_boxed(s) or s


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """Return whether two answers are mathematically equal; either may be None."""
    return str1 == str2 if str1 is None or str2 is None else is_equal(str1, str2)
