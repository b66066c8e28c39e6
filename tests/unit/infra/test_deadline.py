"""Plug-in code with a deadline: it ends by then whatever it does, and code that does not wait costs no task.

All async tests run in virtual time: a healthy call takes no time at all, and only code that waits is ever late.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import threading
from functools import partial
from typing import Any

import pytest

from polyturn.infra.deadline import CallWithDeadline, DeadlineError, Stretch
from support.parts import virtual
from support.refusals import refuses_later

VAR: contextvars.ContextVar[str] = contextvars.ContextVar("VAR", default="unset")


def bounded(*, timeout_s: float = 1.0, grace_s: float = 0.5, **options: Any) -> CallWithDeadline:
    return CallWithDeadline(name="t", timeout_s=timeout_s, grace_s=grace_s, **options)


def num_cancels() -> int:
    """Return the number of pending cancellations of the running task: a deadline must leave none behind."""
    task = asyncio.current_task()
    return task.cancelling()


@virtual
async def test_call_returns_and_raises_what_its_code_does() -> None:
    async def divide(a: int, *, by: int) -> float:
        await asyncio.sleep(0)
        return a / by

    assert await bounded().run(partial(divide, 6, by=2)) == 3
    with pytest.raises(ZeroDivisionError):
        await bounded().run(partial(divide, 6, by=0))


@pytest.mark.parametrize("waits", [True, False])
@virtual
async def test_each_call_is_a_task_with_the_callers_name_and_context(waits: bool) -> None:
    seen: list[Any] = []

    async def look() -> None:
        for _ in range(1 + waits):
            task = asyncio.current_task()
            seen.append((task, task.get_name(), VAR.get()))
            VAR.set("changed")
            if waits:
                await asyncio.sleep(0)

    caller = asyncio.current_task()
    assert caller is not None
    VAR.set("the caller's")
    await bounded().run(look)
    task, name, value = seen[0]
    assert task is not caller
    assert (name, value) == (caller.get_name(), "the caller's")
    assert all(other[0] is task for other in seen)
    assert VAR.get() == "the caller's"


@virtual
async def test_several_calls_can_wait_for_one_future() -> None:
    gate: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def wait() -> str:
        return await gate

    one = bounded()
    calls = [asyncio.create_task(one.run(wait)) for _ in range(3)]
    asyncio.get_running_loop().call_later(0.5, gate.set_result, "open")
    assert [await each for each in calls] == ["open"] * 3


@pytest.mark.parametrize("cleanup_s", [0.0, 0.1])
@virtual
async def test_late_code_is_cancelled_and_cleans_up(cleanup_s: float) -> None:
    events: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            events.append("cancelled")
            if cleanup_s:
                await asyncio.sleep(cleanup_s)
            events.append("clean")

    one = bounded()
    await refuses_later(lambda: one.run(wait), DeadlineError, "1 s")
    assert events == ["cancelled", "clean"]
    assert one.num_abandoned == 0
    assert num_cancels() == 0


@virtual
async def test_answer_of_cancelled_code_is_late_all_the_same() -> None:
    async def answer() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return "an answer"

    with pytest.raises(DeadlineError):
        await bounded().run(answer)


@virtual
async def test_code_that_ignores_cancellation_counts_until_it_ends() -> None:
    gate, ended = asyncio.Event(), asyncio.Event()

    async def ignore() -> None:
        while not gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await gate.wait()
        ended.set()

    one = bounded()
    with pytest.raises(DeadlineError):
        await one.run(ignore)
    assert one.num_abandoned == 1
    assert num_cancels() == 0
    gate.set()
    await ended.wait()
    await asyncio.sleep(0)
    assert one.num_abandoned == 0


class Unreadable(BaseException):
    def __str__(self) -> str:
        raise SystemExit("not even its message")


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, GeneratorExit, Unreadable])
@pytest.mark.parametrize("waits", [True, False])
@virtual
async def test_errors_that_would_end_the_loop_become_runtime_errors(error: type[BaseException], waits: bool) -> None:
    async def leave() -> None:
        if waits:
            await asyncio.sleep(0)
        raise error("bye")

    with pytest.raises(RuntimeError, match=error.__name__):
        await bounded().run(leave)


@virtual
async def test_abandoned_code_cannot_end_the_loop() -> None:
    async def leave() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(2)
            raise SystemExit("bye") from None

    one = bounded()
    with pytest.raises(DeadlineError):
        await one.run(leave)
    assert one.num_abandoned == 1
    await asyncio.sleep(3)
    assert one.num_abandoned == 0


@pytest.mark.parametrize("num_ignored", [0, 1, 10])
@virtual
async def test_cancelled_caller_cancels_the_code(num_ignored: int) -> None:
    """Also where the code swallows its cancellation; code that still runs after the grace is abandoned."""

    async def wait() -> None:
        for _ in range(num_ignored):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(5)
        if not num_ignored:
            await asyncio.sleep(60)

    one = bounded(timeout_s=60)
    task = asyncio.create_task(one.run(wait))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert one.num_abandoned == (num_ignored == 10)


@virtual
async def test_codes_own_timeouts_do_not_move_its_deadline() -> None:
    async def wait(times: int) -> int:
        for _ in range(times):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.25):
                    await asyncio.sleep(60)
        return times

    one = bounded()
    assert await one.run(partial(wait, 3)) == 3
    with pytest.raises(DeadlineError):
        await one.run(partial(wait, 1000))
    assert one.num_abandoned == 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await one.run(partial(asyncio.sleep, 60))
    assert num_cancels() == 0


@virtual
async def test_deadline_inside_another_ends_first() -> None:
    async def call() -> str:
        with pytest.raises(DeadlineError):
            await bounded().run(partial(asyncio.sleep, 60))
        return "went on"

    assert await bounded(timeout_s=2).run(call) == "went on"
    with pytest.raises(DeadlineError):
        await bounded().run(partial(bounded(timeout_s=60).run, partial(asyncio.sleep, 60)))
    assert num_cancels() == 0


@pytest.mark.parametrize("cleanup_s", [0, 1])
@virtual
async def test_task_group_inside_fails_as_elsewhere(cleanup_s: float) -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("one of them")

    async def wait() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(cleanup_s)

    async def group() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())
            tasks.create_task(wait())

    with pytest.raises(ExceptionGroup):
        await bounded(timeout_s=60).run(group)
    assert num_cancels() == 0


@pytest.mark.parametrize("how", ["future", "itself", "itself, without waiting"])
@virtual
async def test_cancellation_from_within_is_the_codes_own_error(how: str) -> None:
    async def cancel() -> str:
        task = asyncio.current_task()
        assert task is not None
        if how == "future":
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(1, future.cancel)
            await future
        task.cancel()
        if how == "itself":
            await asyncio.sleep(60)
        return "an answer"

    await refuses_later(lambda: bounded(timeout_s=60).run(cancel), RuntimeError, "CancelledError")
    assert num_cancels() == 0


@virtual
async def test_deadline_with_a_clock_counts_own_time_only() -> None:
    async def ask() -> str:
        for _ in range(3):
            await asyncio.sleep(0.6)
            with Stretch.paused():
                await asyncio.sleep(5)
        return "done"

    assert await bounded().run(ask, stretch=Stretch()) == "done"
    with pytest.raises(DeadlineError):
        await bounded().run(ask)
    with pytest.raises(DeadlineError):
        await bounded().run(partial(asyncio.sleep, 60), stretch=Stretch())


@virtual
async def test_concurrent_calls_are_late_each_at_its_own_deadline() -> None:
    one, late = bounded(timeout_s=60), list[float]()

    async def is_late(limit_s: float) -> None:
        with pytest.raises(DeadlineError):
            await one.run(partial(asyncio.sleep, 60), timeout_s=limit_s)
        late.append(limit_s)

    quick = asyncio.create_task(one.run(partial(asyncio.sleep, 0.01, "done")))
    await asyncio.gather(*map(is_late, (0.9, 0.1, 0.6, 0.35)))
    assert await quick == "done"
    assert late == [0.1, 0.35, 0.6, 0.9]


@virtual
async def test_deadlines_hold_wherever_the_clock_stands() -> None:
    """The sum of a reading and a deadline may be rounded up, so that the clock shows a hair less than the deadline."""
    one, rng = bounded(timeout_s=5), random.Random(0)
    for _ in range(300):
        await asyncio.sleep(rng.random() * 10)
        with pytest.raises(DeadlineError):
            await one.run(partial(asyncio.sleep, 60))


async def test_late_plain_function_is_left_in_its_thread() -> None:
    gate = threading.Event()
    one = bounded(timeout_s=0.03)
    with pytest.raises(DeadlineError):
        await one.run(gate.wait)
    assert one.num_abandoned == 1
    gate.set()
    while one.num_abandoned:  # noqa: ASYNC110 (nothing says that a thread has ended)
        await asyncio.sleep(0.001)


async def test_waiting_for_a_thread_does_not_count() -> None:
    gate = threading.Event()
    one = bounded(timeout_s=60, max_threads=1)
    running = asyncio.create_task(one.run(gate.wait))
    waiting = asyncio.create_task(one.run(lambda: "done", timeout_s=0.05))
    done, _ = await asyncio.wait({running, waiting}, timeout=0.2)
    assert not done
    waiting.cancel()
    gate.set()
    assert await running is True


def test_clock_of_a_plain_function_starts_when_it_begins() -> None:
    time_s = [0.0]
    clock = Stretch(lambda: time_s[0])
    work = clock.from_its_begin(lambda: "done")
    time_s[0] = 100.0
    assert clock.seconds == 0
    assert work() == "done"
    time_s[0] = 105.0
    assert clock.seconds == 5
