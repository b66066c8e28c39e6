"""Reward functions by name: the shipped ones, `pkg.mod:function`, `file.py:function`, or an entry point.

Built-in functions that read text score only text that the model wrote, never text of a tool or an interaction. They look up
their scorer in its module at each call, so a scorer that a user replaced there takes effect. `BUILT_IN_ROUTES` says which
data_source is scored by which function.
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
    """Return the reward that the environment gave; the reward of each player, if there are several."""
    return environment.compute_score(trajectory)


@rewards.register("exact_match")
def score_exact_match(trajectory: Trajectory) -> float:
    """Compare the last answer with the right answer, or with a list of right answers."""
    return exact_match.compute_score(last_answer(trajectory), ground_truth(trajectory))


@rewards.register("math")
def score_math(trajectory: Trajectory) -> float:
    r"""Compare the content of the last `\boxed{…}` in the last answer with the right answer, as mathematics."""
    return math.compute_score(last_answer(trajectory), ground_truth(trajectory))


@rewards.register("math_stated")
def score_math_stated(trajectory: Trajectory) -> float:
    """Compare the result that the last answer states, in a box or in words, with the right answer, as mathematics."""
    return math.stated_score(last_answer(trajectory), ground_truth(trajectory))


@rewards.register("math_dapo")
def score_math_dapo(trajectory: Trajectory) -> dict[str, Any]:
    """Compare the text after `Answer:` in the last answer with the right answer: 1 if it is right, else -1."""
    return math_dapo.compute_score(last_answer(trajectory), ground_truth(trajectory))


@rewards.register("geo3k")
def score_geo3k(trajectory: Trajectory) -> float:
    r"""Score the last turn, including its reasoning: whether the answer in `\boxed{…}` is right, and whether the form is."""
    return geo3k.compute_score(trajectory.text_of("turn"), ground_truth(trajectory))


@rewards.register("search_r1")
def score_search_r1(trajectory: Trajectory) -> float:
    """Compare the text in `<answer>` in the last turn with the right answers."""
    return search_r1.compute_score(trajectory.text_of("turn"), ground_truth(trajectory))


@rewards.register("code")
def score_code(trajectory: Trajectory, sandbox: code.Sandbox, continuous: bool = True) -> float:
    """Return the share of tests that the program in the last answer passes, or 1 if it passes all and else 0."""
    return code.compute_score(last_answer(trajectory), ground_truth(trajectory), sandbox=sandbox, continuous=continuous)


rewards.register("judge")(judge.score_conversation)

COMPARING = (
    score_gsm8k, score_gsm8k_flexible, score_exact_match, score_math, score_math_stated, score_math_dapo, score_geo3k,
    score_search_r1, score_code,
)  # fmt: skip
"""Functions that need the task's right answer."""

QUICK = (score_environment, score_gsm8k, score_gsm8k_flexible, score_exact_match, score_math_dapo, score_search_r1)
"""Functions that take microseconds for any text, so they are called in the event loop instead of a thread."""

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
    """Return the right answer of a trajectory's task.

    Raises:
        DataError: the task has no right answer.
    """
    return truth_of(trajectory.task)


def truth_of(task: Task) -> Any:
    """Return a task's right answer.

    Raises:
        DataError: the task has no right answer.
    """
    if task.ground_truth is None:
        raise DataError(
            f"task {task.id!r} has no ground_truth; give its row one (ground_truth, or reward_model.ground_truth)"
        )
    return task.ground_truth
