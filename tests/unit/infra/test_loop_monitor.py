"""`LoopMonitor` names the plug-in that blocks the event loop, and ends a process whose plug-in never returns."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import polyturn
from polyturn.core import code_origin
from polyturn.infra.loop import LoopMonitor
from polyturn.infra.nesting import is_deep
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task
from support.parts import Says, Steps, call

pytestmark = pytest.mark.clock

LIMIT_S = 0.1
NOTICED = threading.Event()
"""The monitor has logged a message."""


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        NOTICED.set()


@pytest.fixture(autouse=True)
def messages() -> Iterator[list[str]]:
    """Messages that the monitor logs during a test."""
    handler, logger = Messages(), logging.getLogger("polyturn.infra.loop")
    NOTICED.clear()
    logger.addHandler(handler)
    yield handler.texts
    logger.removeHandler(handler)


def hold() -> None:
    """Hold the loop until the monitor has noticed."""
    NOTICED.wait(60)


@polyturn.tool
async def holds() -> str:
    """Hold the loop without awaiting."""
    hold()
    return "done"


@polyturn.tool
async def holds_between_awaits() -> str:
    """Hold the loop between two awaits, as the construction of a client does."""
    await asyncio.sleep(0)
    hold()
    await asyncio.sleep(0)
    return "done"


class Grumpy(Says):
    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        hold()
        return self.answer


async def test_blocking_tool_is_named_with_place_and_episode(messages: list[str]) -> None:
    context = scripted_context([call("holds"), "#### 4"], tools=[holds], monitor=LoopMonitor(limit_s=LIMIT_S))
    trajectory = await run_episode(context, task(), id="g3/1")
    (message,) = messages
    assert f"in holds ({__file__}:" in message
    assert "episode g3/1" in message
    assert trajectory.metrics["loop_blocked"] == 1
    assert trajectory.metrics["loop_blocked_s"] > LIMIT_S


async def test_warning_is_true_of_a_tool_that_awaits(messages: list[str]) -> None:
    says, monitor = [call("holds_between_awaits"), "#### 4"], LoopMonitor(limit_s=LIMIT_S)
    await run_episode(scripted_context(says, tools=[holds_between_awaits], monitor=monitor), task(), id="e")
    (message,) = messages
    assert "between two of its awaits" in message and "does not await" not in message


async def test_tool_of_an_installed_package_is_named(messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_origin, "PACKAGES", (f"{Path(__file__).parent}/",))
    context = scripted_context([call("holds"), "#### 4"], tools=[holds], monitor=LoopMonitor(limit_s=LIMIT_S))
    await run_episode(context, task(), id="e")
    assert "in holds (" in messages[0]


@pytest.mark.parametrize(
    ("options", "row", "name"),
    [
        ({"scheduler": Steps(lambda episode, turn: hold())}, {}, "Steps.step"),
        ({"interactions": {"user": Grumpy(is_done=True)}}, {"interaction": "user"}, "Grumpy.generate_response"),
    ],
)
async def test_blocking_scheduler_and_interaction_are_named(
    options: dict[str, Any], row: dict[str, Any], name: str, messages: list[str]
) -> None:
    context = scripted_context(["#### 4"], monitor=LoopMonitor(limit_s=LIMIT_S), **options)
    trajectory = await run_episode(context, task(**row), id="e")
    assert not trajectory.is_failed, trajectory.error
    assert f" in {name} (" in messages[0]


def test_plug_in_is_named_once_and_counted_each_time_over_loops(messages: list[str]) -> None:
    @polyturn.tool
    async def sleeps() -> str:
        """Hold the loop for a while."""
        time.sleep(10 * LIMIT_S)  # noqa: ASYNC251
        return "done"

    monitor = LoopMonitor(limit_s=LIMIT_S)
    for number in range(2):
        context = scripted_context([call("sleeps"), "#### 4"], tools=[sleeps], monitor=monitor)
        trajectory = asyncio.run(run_episode(context, task(), id=f"e{number}"))
        assert trajectory.metrics["loop_blocked"] == 1
    assert len(messages) == 1


async def test_code_that_awaits_or_waits_for_the_library_is_not_named(messages: list[str]) -> None:
    wide = [[0]] * 100_000
    with LoopMonitor(limit_s=LIMIT_S).watching():
        await asyncio.sleep(5 * LIMIT_S)
        until = time.monotonic() + 3 * LIMIT_S
        while time.monotonic() < until:
            is_deep(wide)
    assert messages == []


async def test_monitor_thread_ends_after_the_last_episode() -> None:
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "polyturn-loop-monitor"}

    others = threads()
    monitor = LoopMonitor(limit_s=0.04)
    for _ in range(2):
        with monitor.watching():
            await asyncio.sleep(0.05)
            assert len(threads() - others) == 1
        while threads() - others:  # noqa: ASYNC110 (nothing says that a thread has ended)
            await asyncio.sleep(0.01)


PROGRAM = """
import asyncio, time
from polyturn.infra import loop

loop.HELD_S = 0.0

async def plugin():
    {work}

async def work():
    with loop.LoopMonitor(limit_s=None, deadline_s={deadline_s}).watching():
        await plugin()
    return "done"

print("begun")
print(loop.run_loop(work()))
"""


@pytest.mark.parametrize("work", ["while True: pass", "time.sleep(3600)"])
def test_plug_in_that_never_returns_ends_the_process(tmp_path: Path, work: str) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(work=work, deadline_s=0.4))
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (2, "begun\n"), done.stderr
    assert f"a plug-in has held the event loop: work ({file}:" in done.stderr


def test_plug_in_that_returns_in_time_does_not_end_the_process(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(work="time.sleep(0.5); await asyncio.sleep(0)", deadline_s=60))
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, "begun\ndone\n", "")
