"""Reward functions by name: the shipped ones, `pkg.mod:function`, `file.py:function`, or an entry point.

Built-in functions score only text of the model, never that of a tool or an interaction. They call their scorer through its
module, so that a scorer that a user replaced there takes effect. `BUILT_IN_ROUTES` maps data_sources to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from polyturn.core.errors import DataError
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory
from polyturn.infra.plugins import Registry
from polyturn.partners import judge
from polyturn.rewards import code, environment, exact_match, geo3k, gsm8k, math, math_dapo, search_r1

__all__ = ["BUILT_IN_ROUTES", "CHECKS", "COMPARING", "QUICK", "ground_truth", "last_answer", "rewards", "truth_of"]

_MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
_DAPO = ("math_dapo", "math", "math_dapo_reasoning", "aime*")
_CODE = ("codecontests", "apps", "codeforces", "taco")

BUILT_IN_ROUTES: Mapping[str, str] = {
    "openai/gsm8k": "gsm8k",
    **dict.fromkeys(_MATH, "math"),
    "numina_*": "math_stated",
    **dict.fromkeys(_DAPO, "math_dapo"),
    **dict.fromkeys(_CODE, "code"),
    "hiyouga/geometry3k": "geo3k",
    "searchR1_*": "search_r1",
    "env/*": "environment",
}
"""data_source or glob -> the reward that scores it by default."""

rewards: Registry[Any] = Registry("rewards")
"""Reward functions by name, in one of the forms that `rewards.function.RewardFunction` accepts."""


@rewards.register("gsm8k")
def score_gsm8k(trajectory: Trajectory) -> float:
    """Score the last answer in the form `#### N`."""
    return gsm8k.compute_score(last_answer(trajectory), ground_truth(trajectory), method="strict")


@rewards.register("gsm8k_flexible")
def score_gsm8k_flexible(trajectory: Trajectory) -> float:
    """Score the last number of the last answer."""
    return gsm8k.compute_score(last_answer(trajectory), ground_truth(trajectory), method="flexible")


@rewards.register("environment")
def score_environment(trajectory: Trajectory) -> Any:
    """Take what the environment gave, by player where there are several."""
    return environment.compute_score(trajectory)


@rewards.register("exact_match")
def score_exact_match(trajectory: Trajectory) -> float:
    """Score the last answer by comparison with the right one, or with a list of right ones."""
    return exact_match.compute_score(last_answer(trajectory), ground_truth(trajectory))


@rewards.register("math")
def score_math(trajectory: Trajectory) -> float:
    r"""Score what the last answer has in its last `\boxed{…}`, as mathematics."""
    return math.compute_score(last_answer(trajectory), ground_truth(trajectory))


@rewards.register("math_stated")
def score_math_stated(trajectory: Trajectory) -> float:
    """Score the answer that the last answer states, in a box or in words, as mathematics."""
    return math.stated_score(last_answer(trajectory), ground_truth(trajectory))


@rewards.register("math_dapo")
def score_math_dapo(trajectory: Trajectory) -> dict[str, Any]:
    """Score what follows `Answer:` in the last answer: 1 or -1."""
    return math_dapo.compute_score(last_answer(trajectory), ground_truth(trajectory))


@rewards.register("geo3k")
def score_geo3k(trajectory: Trajectory) -> float:
    r"""Score the last turn, its reasoning included: the answer in `\boxed{…}`, and the form."""
    return geo3k.compute_score(trajectory.text_of("turn"), ground_truth(trajectory))


@rewards.register("search_r1")
def score_search_r1(trajectory: Trajectory) -> float:
    """Score what the last turn has in `<answer>`, by comparison with the right answers."""
    return search_r1.compute_score(trajectory.text_of("turn"), ground_truth(trajectory))


@rewards.register("code")
def score_code(trajectory: Trajectory, sandbox: code.Sandbox, continuous: bool = True) -> float:
    """Score the program of the last answer: the share of the tests that it passes, or whether it passes all."""
    return code.compute_score(last_answer(trajectory), ground_truth(trajectory), sandbox=sandbox, continuous=continuous)


rewards.register("judge")(judge.score_conversation)

COMPARING = (
    score_gsm8k, score_gsm8k_flexible, score_exact_match, score_math, score_math_stated, score_math_dapo, score_geo3k,
    score_search_r1, score_code,
)  # fmt: skip
"""Functions that need the task's right answer."""

QUICK = (score_environment, score_gsm8k, score_gsm8k_flexible, score_exact_match, score_math_dapo, score_search_r1)
"""Functions that take microseconds for any text, and are called without a thread."""

CHECKS: tuple[tuple[Callable[..., Any], Callable[[Mapping[str, Any]], object]], ...] = (
    (score_math, lambda kwargs: math.require()),
    (score_math_stated, lambda kwargs: math.require()),
    (score_geo3k, lambda kwargs: math.require()),
    (score_code, lambda kwargs: kwargs["sandbox"].require()),
    (judge.score_conversation, judge.require),
)
"""(function, check) for functions that need a library or service; the check gets the function's arguments."""


def last_answer(trajectory: Trajectory) -> str:
    """Return the text of the model's last message; empty if it wrote none."""
    return trajectory.text_of("answer")


def ground_truth(trajectory: Trajectory) -> Any:
    """Return the task's right answer.

    Raises:
        DataError: it has none.
    """
    return truth_of(trajectory.task)


def truth_of(task: Task) -> Any:
    """Return a task's right answer.

    Raises:
        DataError: it has none.
    """
    if task.ground_truth is None:
        raise DataError(
            f"task {task.id!r} has no ground_truth; give its row one (ground_truth, or reward_model.ground_truth)"
        )
    return task.ground_truth
