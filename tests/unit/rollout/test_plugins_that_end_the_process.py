"""A plug-in that raises or returns an exit fails alone; only a signal ends the process."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest

import polyturn
from polyturn.core.trajectory import Trajectory
from polyturn.interactions.base import BaseInteraction
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing.episodes import scripted_context, task
from support.parts import call

pytestmark = [pytest.mark.parametrize("waits", [False, True]), pytest.mark.parametrize("error", [SystemExit])]


def hostile(error: type[BaseException]) -> Any:
    """Return an object whose every operation raises."""

    def leave(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise error

    operations = ("float", "int", "index", "bool", "str", "repr", "iter", "len", "eq", "getitem", "contains")
    return type("Hostile", (), {f"__{name}__": leave for name in operations} | {"keys": leave, "items": leave})()


def leaving(error: type[BaseException], gives: Any) -> Any:
    if gives == "raises":
        raise error
    return hostile(error)


def in_form(answer: Callable[..., Any], *, waits: bool, name: str) -> Any:
    """Return a plain or async function of any arguments with this name."""

    async def later(*args: Any, **kwargs: Any) -> Any:
        """Leave."""
        return answer()

    def at_once(*args: Any, **kwargs: Any) -> Any:
        """Leave."""
        return answer()

    function = later if waits else at_once
    function.__name__ = name
    return function


def run(says: list[str], row: Any = None, **parts: Any) -> Trajectory:
    """Run an episode in an event loop that continues afterwards."""

    async def main() -> Trajectory:
        trajectory = await run_episode(scripted_context(says, **parts), row or task(), id="e0")
        await asyncio.sleep(0)
        return trajectory

    try:
        return asyncio.run(main())
    except BaseException:  # pytest must neither end by it nor print it
        lines = traceback.extract_tb(sys.exc_info()[2])
    raise AssertionError("it left: " + ", ".join(f"{line.filename.rpartition('/')[2]}:{line.lineno}" for line in lines[-6:]))


@pytest.mark.parametrize("gives", ["raises", "returns", "metric"])
def test_tool_fails_alone(error: type[BaseException], gives: str, waits: bool) -> None:
    def answer() -> Any:
        return ("fine", None, {"seconds": hostile(error)}) if gives == "metric" else leaving(error, gives)

    async def later() -> Any:
        """Leave."""
        return answer()

    def at_once() -> Any:
        """Leave."""
        return answer()

    at_once.__name__ = later.__name__ = "leave"
    trajectory = run([call("leave"), "#### 4"], tools=[polyturn.tool(later if waits else at_once)])
    assert len(trajectory.turns) == 2
    assert trajectory.error is None


@pytest.mark.parametrize("gives", ["raises", "returns", "score", "other"])
def test_reward_fails_its_trajectory(error: type[BaseException], gives: str, waits: bool) -> None:
    def value() -> Any:
        inside = {"score": {"score": hostile(error)}, "other": {"score": 1.0, "why": hostile(error)}}
        return inside[gives] if gives in inside else leaving(error, gives)

    async def later(solution_str: str) -> Any:
        return value()

    reward = later if waits else lambda solution_str: value()
    trajectory = run(["#### 4"], task(data_source="mine"), rewards={"mine": reward})
    assert gives == "other" or "reward" in (trajectory.error or "")


@pytest.mark.parametrize("gives", ["raises", "returns", 0, 1, 2, 3])
def test_interaction_fails_its_trajectory(error: type[BaseException], gives: Any, waits: bool) -> None:
    def answer() -> Any:
        if isinstance(gives, str):
            return leaving(error, gives)
        return tuple(hostile(error) if index == gives else good for index, good in enumerate((False, "go on", 0.0, {})))

    method = in_form(answer, waits=waits, name="generate_response")
    partner = type("Mine", (BaseInteraction,), {"generate_response": method})({"name": "partner"})
    trajectory = run(["hm", "#### 4"], task(interaction="partner"), interactions={"partner": partner})
    assert "partner" in (trajectory.error or "")


@pytest.mark.parametrize("gives", ["raises", "returns"])
@pytest.mark.parametrize("name", ["step", "check_finished", "on_turn_end", "on_trajectory_start"])
def test_scheduler_fails_its_trajectory(error: type[BaseException], gives: str, name: str, waits: bool) -> None:
    method = in_form(lambda: leaving(error, gives), waits=waits, name=name)
    trajectory = run(["#### 4"], scheduler=type("Mine", (MultiTurnScheduler,), {name: method})())
    assert trajectory.error is not None or (name, gives) == ("on_trajectory_start", "returns")
