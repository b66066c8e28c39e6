"""A comparison that never ends, or whose process dies, is tried twice and then an error, never a wrong answer."""

import pytest

from polyturn.core.errors import RewardError
from polyturn.rewards import math
from polyturn.rewards.processes import EndedCallError, LateCallError
from support.refusals import refuses


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the next comparisons come to; an exception is raised."""
    outcomes: list[object] = []

    def checker(**_: str) -> object:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(math, "_checkers", checker)
    math._compare.cache_clear()
    return outcomes


@pytest.mark.parametrize("problem", [LateCallError("late"), EndedCallError("killed")])
def test_second_try_decides(calls: list[object], problem: Exception) -> None:
    calls += [problem, True]
    assert math.is_equal("1/2", "0.50")


def test_two_failures_are_an_error_that_is_not_remembered(calls: list[object]) -> None:
    calls += [LateCallError("late"), EndedCallError("killed"), True]
    refuses(lambda: math.compute_score(r"\boxed{1/2}", "0.50"), RewardError, "twice")
    assert math.compute_score(r"\boxed{1/2}", "0.50") == 1.0
