"""Reward functions by name: the shipped ones, `pkg.mod:function`, `file.py:function`, or an entry point.

`BUILT_IN_ROUTES` are the data_sources that need no route in a config. Shipped functions score the text of the last
assistant message and call their scorer through its module, so that a replaced scorer is used.
"""

from __future__ import annotations

from typing import Any

from polyturn.core.errors import DataError
from polyturn.core.registry import Registry
from polyturn.core.trajectory import Trajectory
from polyturn.rewards import exact_match, gsm8k

rewards: Registry[Any] = Registry("rewards")
"""Functions of one of the forms that `rewards.function.RewardFunction` reads."""

BUILT_IN_ROUTES = {"openai/gsm8k": "gsm8k"}
"""data_source -> name of a reward function."""


@rewards.register("gsm8k")
def score_gsm8k(trajectory: Trajectory) -> float:
    """Score the last answer in the form `#### N`."""
    return gsm8k.compute_score(last_answer(trajectory), ground_truth(trajectory), method="strict")


@rewards.register("gsm8k_flexible")
def score_gsm8k_flexible(trajectory: Trajectory) -> float:
    """Score the last number of the last answer."""
    return gsm8k.compute_score(last_answer(trajectory), ground_truth(trajectory), method="flexible")


@rewards.register("exact_match")
def score_exact_match(trajectory: Trajectory) -> float:
    """Score the last answer by comparison with the right one, or with a list of right ones."""
    return exact_match.compute_score(last_answer(trajectory), ground_truth(trajectory))


QUICK = (score_gsm8k, score_gsm8k_flexible, score_exact_match)
"""Functions that take microseconds whatever the model wrote, and so are called without a thread."""


def last_answer(trajectory: Trajectory) -> str:
    """Return the text of the model's last message; empty if it wrote none."""
    return trajectory.turns[-1].message.text if trajectory.turns else ""


def ground_truth(trajectory: Trajectory) -> Any:
    """Return the task's right answer.

    Raises:
        DataError: it has none.
    """
    if trajectory.task.ground_truth is None:
        raise DataError(
            f"task {trajectory.task.id!r} has no ground_truth; give its row one (ground_truth, or reward_model.ground_truth)"
        )
    return trajectory.task.ground_truth
