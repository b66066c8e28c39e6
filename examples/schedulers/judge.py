"""Judges: decide in the middle of an episode whether an answer is right, for the other schedulers of this folder.

    judge = build_judge("math")                    one of polyturn's scorers
    judge = build_judge("mine.py:is_right")        def is_right(text, ground_truth): return True or a score above 0

A judge may be slow: schedulers call it with `episode.call`, in a thread. It only decides how the conversation continues; the
run's reward functions give the reward.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from polyturn import ConfigError, DataError, SchedulerError, Task
from polyturn.core.errors import UnknownNameError, did_you_mean
from polyturn.core.tagged import between
from polyturn.infra.plugins import import_attr
from polyturn.rewards import exact_match, gsm8k, math

Judge = Callable[[str, Any], float]
"""(text of the model, ground truth of the task) -> above 0 if the text is right."""


def judge_math(text: str, ground_truth: Any) -> float:
    r"""Return 1.0 if the last `<answer>…</answer>`, else the last `\boxed{…}`, equals the truth mathematically."""
    tagged = between(text, "<answer>", "</answer>")
    return math.compute_score(rf"\boxed{{{tagged[-1].strip()}}}" if tagged else text, ground_truth)


def judge_gsm8k(text: str, ground_truth: Any) -> float:
    """Return 1.0 if the text after the last `####` is the truth."""
    return gsm8k.compute_score(text, ground_truth, method="strict")


def judge_exact(text: str, ground_truth: Any) -> float:
    """Return 1.0 if the last `<answer>…</answer>`, else the whole text, is the truth."""
    tagged = between(text, "<answer>", "</answer>")
    return exact_match.compute_score(tagged[-1] if tagged else text, ground_truth)


JUDGES: dict[str, Judge] = {"math": judge_math, "gsm8k": judge_gsm8k, "exact_match": judge_exact}


def build_judge(judge: str | Judge, *, base: Path | None = None) -> Judge:
    """Return the judge for a name in `JUDGES`, a `file.py:function` or a function.

    Raises:
        ConfigError: `judge` is not a function, or needs a library that is not installed.
    """
    if isinstance(judge, str):
        if judge not in JUDGES and ":" not in judge:
            raise UnknownNameError(f"judge: there is no {judge!r}.{did_you_mean(judge, JUDGES)}")
        if judge == "math":
            math.require()
        judge = JUDGES[judge] if judge in JUDGES else import_attr(judge, base=base, key="judge")
    if not callable(judge):
        raise ConfigError(f"the judge is {judge!r:.100}; it must be a function of (text, ground_truth)")
    return judge


def require_truth(task: Task, *, who: str) -> None:
    """Reject a task without a ground truth.

    Raises:
        DataError: the task has no ground truth.
    """
    if task.ground_truth is None:
        raise DataError(f"task {task.id!r} has no ground_truth, which the scheduler {who!r} needs; add the column")


def is_right(score: Any) -> bool:
    """Return whether a judge's score means that the answer is right.

    Raises:
        SchedulerError: the score is neither a bool nor a number.
    """
    if not isinstance(score, bool | int | float):
        raise SchedulerError(f"the judge returned {score!r:.100}; return True, False or a number")
    return score > 0
