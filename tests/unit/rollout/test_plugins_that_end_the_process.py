"""What a plug-in raises or returns to end the process fails that plug-in; only a signal is a person who wants the end."""

from __future__ import annotations

import asyncio
import sys
import traceback
from typing import Any

import pytest

import polyturn
from polyturn.core.protocols import Tool
from polyturn.core.trajectory import Trajectory
from polyturn.interactions.base import BaseInteraction
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing.episodes import scripted_context, task

ENDS = [KeyboardInterrupt, SystemExit, ZeroDivisionError]
CALL = '<tool_call>{"name": "leave", "arguments": {}}</tool_call>'


def hostile(error: type[BaseException]) -> Any:
    """Return an object that raises whatever is asked of it."""

    def leave(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise error

    asked = ("float", "int", "index", "bool", "str", "repr", "iter", "len", "eq", "getitem", "contains")
    return type("Hostile", (), {f"__{name}__": leave for name in asked} | {"keys": leave, "items": leave})()


def leaving(error: type[BaseException], gives: str) -> Any:
    if gives == "raises":
        raise error
    return hostile(error)


def run(says: list[str], row: Any = None, **parts: Any) -> Trajectory:
    """Run an episode in a loop that goes on behind it."""

    async def main() -> Trajectory:
        trajectory = await run_episode(scripted_context(says, **parts), row or task(), id="e0")
        await asyncio.sleep(0)
        return trajectory

    try:
        return asyncio.run(main())
    except BaseException:  # which would end the test run, too, and cannot be written out
        lines = traceback.extract_tb(sys.exc_info()[2])
    raise AssertionError("it left: " + ", ".join(f"{line.filename.rpartition('/')[2]}:{line.lineno}" for line in lines[-6:]))


@pytest.mark.parametrize("error", ENDS)
@pytest.mark.parametrize("gives", ["raises", "returns", "metric"])
@pytest.mark.parametrize("waits", [False, True])
def test_a_tool(error: type[BaseException], gives: str, waits: bool) -> None:
    def answer() -> Any:
        return ("fine", None, {"seconds": hostile(error)}) if gives == "metric" else leaving(error, gives)

    async def later() -> Any:
        """Leave."""
        return answer()

    def at_once() -> Any:
        """Leave."""
        return answer()

    at_once.__name__ = later.__name__ = "leave"
    tool: Tool = polyturn.tool(later if waits else at_once)
    trajectory = run([CALL, "#### 4"], tools=[tool])
    assert len(trajectory.turns) == 2 and trajectory.error is None


@pytest.mark.parametrize("error", ENDS)
@pytest.mark.parametrize("gives", ["raises", "returns", "score", "other"])
@pytest.mark.parametrize("waits", [False, True])
def test_a_reward(error: type[BaseException], gives: str, waits: bool) -> None:
    def value() -> Any:
        inside = {"score": {"score": hostile(error)}, "other": {"score": 1.0, "why": hostile(error)}}
        return inside[gives] if gives in inside else leaving(error, gives)

    def at_once(solution_str: str) -> Any:
        return value()

    async def later(solution_str: str) -> Any:
        return value()

    trajectory = run(["#### 4"], task(data_source="mine"), rewards={"mine": later if waits else at_once})
    assert gives == "other" or (trajectory.error is not None and "reward" in trajectory.error)


@pytest.mark.parametrize("error", ENDS)
@pytest.mark.parametrize("gives", ["raises", "returns", 0, 1, 2, 3])
@pytest.mark.parametrize("waits", [False, True])
def test_an_interaction(error: type[BaseException], gives: Any, waits: bool) -> None:
    def answer() -> Any:
        if isinstance(gives, str):
            return leaving(error, gives)
        return tuple(hostile(error) if place == gives else good for place, good in enumerate((False, "go on", 0.0, {})))

    class Later(BaseInteraction):
        async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
            return answer()

    class AtOnce(BaseInteraction):
        def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            return answer()

    partner = (Later if waits else AtOnce)({"name": "partner"})
    trajectory = run(["hm", "#### 4"], task(interaction="partner"), interactions={"partner": partner})
    assert trajectory.error is not None and "partner" in trajectory.error


@pytest.mark.parametrize("error", ENDS)
@pytest.mark.parametrize("gives", ["raises", "returns"])
@pytest.mark.parametrize("which", ["step", "check_finished", "on_turn_end", "on_trajectory_start"])
@pytest.mark.parametrize("waits", [False, True])
def test_a_scheduler(error: type[BaseException], gives: str, which: str, waits: bool) -> None:
    async def later(self: Any, *args: Any) -> Any:
        return leaving(error, gives)

    def at_once(self: Any, *args: Any) -> Any:
        return leaving(error, gives)

    method = later if waits else at_once
    method.__name__ = which
    trajectory = run(["#### 4"], scheduler=type("Mine", (MultiTurnScheduler,), {which: method})())
    assert trajectory.error is not None or (which, gives) == ("on_trajectory_start", "returns")
