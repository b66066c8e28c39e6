"""The watchdog names the plug-in that holds the event loop, while it does, and nobody else."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from types import FunctionType
from typing import Any

import pytest

import polyturn
from polyturn.core import watchdog
from polyturn.core.code_origin import PACKAGES
from polyturn.core.nesting import is_deep
from polyturn.core.watchdog import Culprit, LoopWatchdog, calls_plugins
from polyturn.infra.deadline import CallWithDeadline
from polyturn.infra.threads import DaemonThreads
from polyturn.interactions.base import BaseInteraction
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing.episodes import scripted_context, task

CALL = '<tool_call>\n{"name": "holds", "arguments": {}}\n</tool_call>'
LIMIT_S = 0.1
NOTICED = threading.Event()
"""A watchdog of the tests has said who holds the loop."""


class Watchdog(LoopWatchdog):
    """Lets whoever holds the loop go on as soon as it has noticed."""

    def __init__(self) -> None:
        super().__init__(limit_s=LIMIT_S)

    def _say(self, culprit: Culprit, seconds: float) -> None:
        super()._say(culprit, seconds)
        NOTICED.set()


@polyturn.tool
async def holds() -> str:
    """Hold the loop without awaiting."""
    helper()
    return "done"


def helper() -> None:
    """Return once the watchdog has noticed."""
    NOTICED.clear()
    NOTICED.wait()


class Blocks(MultiTurnScheduler):
    """A scheduler that computes on the event loop."""

    async def step(self, episode: Any, turn: Any) -> Any:
        helper()


class Grumpy(BaseInteraction):
    """An interaction that computes on the event loop."""

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        helper()
        return True, "bye", 1.0, {}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "polyturn.core.watchdog"]


async def test_a_tool_that_blocks_is_named_with_its_place_and_its_episode_while_it_does(caplog: pytest.LogCaptureFixture):
    context = scripted_context([CALL, "#### 4"], tools=[holds], watchdog=Watchdog())
    trajectory = await run_episode(context, task(), id="g3/1")  # comes back only if it is said before the call does
    (said,) = warnings(caplog)
    first = inspect.getsourcelines(holds.function)[1]
    assert f"in holds ({__file__}:{first}, now at {__file__}:{helper.__code__.co_firstlineno + 3}), episode g3/1" in said
    assert "write it as a plain function" in said
    assert trajectory.metrics["loop_blocked"] == 1
    assert trajectory.metrics["loop_blocked_s"] > LIMIT_S


@pytest.mark.parametrize(
    ("options", "row", "name"),
    [
        ({"scheduler": Blocks()}, {}, "Blocks.step"),
        ({"interactions": {"user": Grumpy({"name": "user"})}}, {"interaction": "user"}, "Grumpy.generate_response"),
    ],
)
async def test_schedulers_and_interactions_are_named_too(
    options: dict[str, Any], row: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
):
    context = scripted_context(["#### 4"], watchdog=Watchdog(), **options)
    trajectory = await run_episode(context, task(**row), id="e")
    assert not trajectory.is_failed, trajectory.error
    assert f" in {name} (" in warnings(caplog)[0]


async def test_a_plug_in_is_named_once_and_counted_each_time(caplog: pytest.LogCaptureFixture):
    watchdog = Watchdog()
    context = scripted_context([CALL, CALL, "#### 4"], tools=[holds], watchdog=watchdog)
    for number in range(2):
        await run_episode(context, task(), id=f"e{number}")
    assert len(warnings(caplog)) == 1
    assert watchdog.num_blocked["holds"] >= 2


async def test_nothing_is_said_of_who_awaits(caplog: pytest.LogCaptureFixture):
    watchdog = LoopWatchdog(limit_s=LIMIT_S)
    with watchdog.watching():
        await asyncio.sleep(5 * LIMIT_S)
    assert warnings(caplog) == []


async def test_nobody_is_named_who_only_waits_for_what_the_library_does(caplog: pytest.LogCaptureFixture):
    wide = [[0]] * 100_000

    async def waits() -> None:
        until = time.monotonic() + 3 * LIMIT_S
        while time.monotonic() < until:
            is_deep(wide)

    with LoopWatchdog(limit_s=LIMIT_S).watching():
        await waits()
    assert warnings(caplog) == []


@pytest.mark.parametrize("is_task", [False, True])
async def test_nobody_is_named_for_what_the_library_asks_another_package_for(
    is_task: bool, caplog: pytest.LogCaptureFixture
):
    """As the tokenizer for a long text that a plug-in's call is to have encoded."""

    def slow(value: Any) -> bool:
        time.sleep(4 * LIMIT_S)
        return False

    package = slow.__code__.replace(co_filename=f"{PACKAGES[0]}transformers/tokenization.py")
    library = is_deep.__code__

    async def step() -> None:
        asks(None)

    def asks(value: Any) -> bool:
        return bool(encode(value))

    encode = FunctionType(package, slow.__globals__, closure=slow.__closure__)
    asks.__code__ = asks.__code__.replace(co_filename=library.co_filename)
    calls = CallWithDeadline(name="b", timeout_s=60)
    with LoopWatchdog(limit_s=LIMIT_S).watching():
        await (asyncio.create_task(step()) if is_task else calls.run(step))
    assert warnings(caplog) == []


async def test_a_plug_in_of_an_installed_package_is_named(caplog: pytest.LogCaptureFixture):
    async def judges() -> None:
        helper()

    packaged = FunctionType(judges.__code__.replace(co_filename=f"{PACKAGES[0]}judges.py"), judges.__globals__, "judges")
    with Watchdog().watching():
        await CallWithDeadline(name="b", timeout_s=60).run(packaged)
    assert f"judges ({PACKAGES[0]}judges.py:" in warnings(caplog)[0]


async def test_the_time_in_which_the_loop_waits_for_a_processor_counts_for_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watchdog, "seconds_without_processor", lambda native: time.monotonic())

    async def computes() -> None:
        time.sleep(4 * LIMIT_S)  # noqa: ASYNC251

    with LoopWatchdog(limit_s=LIMIT_S).watching():
        await CallWithDeadline(name="b", timeout_s=60).run(computes)
    assert warnings(caplog) == []


def test_a_thread_of_this_process_has_waited_for_some_time_and_any_other_for_none():
    assert watchdog.seconds_without_processor(threading.get_native_id()) >= 0.0
    assert watchdog.seconds_without_processor(0) == 0.0


async def test_the_library_is_never_named_for_what_it_does_between_a_caller_and_a_plug_in(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """As on a busy machine, where the thread finds the loop wherever it happens to be."""
    submit = DaemonThreads._submit

    def slow_submit(self: DaemonThreads, job: Any) -> None:
        time.sleep(4 * LIMIT_S)
        submit(self, job)

    monkeypatch.setattr(DaemonThreads, "_submit", slow_submit)
    slow_submit.__code__ = slow_submit.__code__.replace(co_filename=DaemonThreads.run.__code__.co_filename)
    with LoopWatchdog(limit_s=LIMIT_S).watching():
        assert await CallWithDeadline(name="b", timeout_s=60).run(lambda: "done") == "done"
    assert warnings(caplog) == []


async def test_a_task_that_a_plug_in_started_is_named_without_its_episode(caplog: pytest.LogCaptureFixture):
    async def background() -> None:
        helper()

    @calls_plugins
    async def call() -> None:
        await asyncio.create_task(background())

    with Watchdog().watching():
        await call()
    (said,) = warnings(caplog)
    assert "background (" in said
    assert "episode unknown" in said


async def test_its_thread_ends_soon_after_the_last_episode():
    watchdog = LoopWatchdog(limit_s=0.04)

    def its_threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "polyturn-watchdog"} - of_other_tests

    of_other_tests: set[threading.Thread] = set()
    of_other_tests = its_threads()
    for _ in range(3):
        with watchdog.watching():
            await asyncio.sleep(0.05)
            assert len(its_threads()) == 1
        while its_threads():  # noqa: ASYNC110 (nothing says that a thread has ended)
            await asyncio.sleep(0.01)


def test_one_watchdog_serves_one_loop_after_another(caplog: pytest.LogCaptureFixture):
    watchdog = Watchdog()
    for number in range(2):
        context = scripted_context([CALL, "#### 4"], tools=[holds], watchdog=watchdog)
        trajectory = asyncio.run(run_episode(context, task(), id=f"e{number}"))
        assert trajectory.metrics["loop_blocked"] == 1
    assert len(warnings(caplog)) == 1
