"""Code of authors with a deadline: it ends by it whatever it does, and what does not wait costs no task."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from functools import partial
from typing import Any

import pytest

from polyturn.core.own_time import OwnTime
from polyturn.infra.deadline import CallWithDeadline, DeadlineError
from polyturn.infra.threads import DaemonThreads

VAR: contextvars.ContextVar[str] = contextvars.ContextVar("VAR", default="unset")


def bounded(**options: Any) -> CallWithDeadline:
    return CallWithDeadline(name="t", **{"timeout_s": 0.03, "grace_s": 0.03} | options)


async def test_it_returns_and_raises_what_the_code_does() -> None:
    async def divides(a: int, *, by: int) -> float:
        await asyncio.sleep(0)
        return a / by

    assert await bounded().run(partial(divides, 6, by=2)) == 3
    with pytest.raises(ZeroDivisionError):
        await bounded().run(partial(divides, 6, by=0))


@pytest.mark.parametrize("waits", [True, False])
async def test_each_call_is_a_task_of_its_own_with_the_callers_name_and_context(waits: bool) -> None:
    seen: list[Any] = []

    async def looks() -> None:
        for _ in range(1 + waits):
            task = asyncio.current_task()
            assert task is not None
            seen.append((task, task.get_name(), VAR.get()))
            VAR.set("changed")
            if waits:
                await asyncio.sleep(0)

    caller = asyncio.current_task()
    assert caller is not None
    VAR.set("the caller's")
    await bounded().run(looks)
    task, name, value = seen[0]
    assert task is not caller
    assert (name, value) == (caller.get_name(), "the caller's")
    assert all(other[0] is task for other in seen)
    assert VAR.get() == "the caller's"
    assert asyncio.current_task() is caller


@pytest.mark.parametrize("of_task", [True, False])
async def test_several_calls_may_begin_to_wait_for_one_and_the_same(of_task: bool) -> None:
    gate: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def opens() -> str:
        return await gate

    shared: asyncio.Future[str] = asyncio.create_task(opens()) if of_task else gate

    async def waits() -> str:
        return await shared

    one = bounded(timeout_s=60)
    calls = [asyncio.create_task(one.run(waits)) for _ in range(3)]
    asyncio.get_running_loop().call_later(0.005, gate.set_result, "open")
    assert [await call for call in calls] == ["open"] * 3


@pytest.mark.parametrize("at_once", [True, False])
async def test_code_that_is_late_is_cancelled_and_cleans_up(at_once: bool) -> None:
    events: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            events.append("cancelled")
            if not at_once:
                await asyncio.sleep(0.001)
            events.append("clean")

    one = bounded()
    with pytest.raises(DeadlineError, match=r"longer than 0\.03 s"):
        await one.run(waits)
    assert events == ["cancelled", "clean"]
    assert one.num_abandoned == 0
    assert _cancels() == 0


async def test_code_that_answers_after_it_was_cancelled_is_late_all_the_same() -> None:
    async def answers() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return "an answer"

    with pytest.raises(DeadlineError):
        await bounded().run(answers)


async def test_code_that_ignores_being_cancelled_is_left_behind_and_counted_until_it_ends() -> None:
    gate, ended = asyncio.Event(), asyncio.Event()

    async def ignores() -> None:
        while not gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await gate.wait()
        ended.set()

    one = bounded()
    with pytest.raises(DeadlineError):
        await one.run(ignores)
    assert one.num_abandoned == 1
    assert _cancels() == 0
    gate.set()
    await ended.wait()
    await asyncio.sleep(0)
    assert one.num_abandoned == 0


class Quits(KeyboardInterrupt):
    """What a library raises in place of it, for instance to say whose key was pressed."""


class Unreadable(BaseException):
    def __str__(self) -> str:
        raise SystemExit("not even its message")


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, GeneratorExit, Quits, Unreadable])
@pytest.mark.parametrize("waits", [True, False])
async def test_errors_that_would_end_more_become_runtime_errors(error: type[BaseException], waits: bool) -> None:
    async def leaves() -> None:
        if waits:
            await asyncio.sleep(0)
        raise error("bye")

    with pytest.raises(RuntimeError, match=error.__name__):
        await bounded().run(leaves)


async def test_code_left_behind_cannot_end_the_loop() -> None:
    async def leaves() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            raise SystemExit("bye") from None

    one = bounded()
    with pytest.raises(DeadlineError):
        await one.run(leaves)
    assert one.num_abandoned == 1
    await asyncio.sleep(0.05)
    assert one.num_abandoned == 0


async def test_whoever_waits_can_be_cancelled_and_the_code_with_it() -> None:
    events: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            events.append("cancelled")

    task = asyncio.create_task(bounded(timeout_s=60).run(waits))
    await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert events == ["cancelled"]


@pytest.mark.parametrize("answers", [True, False])
async def test_a_cancellation_is_not_lost_in_code_that_swallows_it(answers: bool) -> None:
    async def swallows() -> None:
        for _ in range(1 if answers else 10):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.1)

    one = bounded(timeout_s=60)
    task = asyncio.create_task(one.run(swallows))
    await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert one.num_abandoned == (0 if answers else 1)


async def test_the_codes_own_timeouts_are_its_own_and_do_not_move_its_deadline() -> None:
    async def waits(times: int) -> int:
        for _ in range(times):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await asyncio.sleep(60)
        return times

    one = bounded(timeout_s=0.1, grace_s=0.02)
    assert await one.run(partial(waits, 3)) == 3
    with pytest.raises(DeadlineError):
        await one.run(partial(waits, 1000))
    assert one.num_abandoned == 0
    assert _cancels() == 0


async def test_a_timeout_around_it_is_the_one_that_ends_it() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.005):
            await bounded(timeout_s=60).run(partial(asyncio.sleep, 60))
    assert _cancels() == 0


async def test_one_inside_another_ends_the_inner_one_first() -> None:
    inner, outer = bounded(), bounded(timeout_s=0.2)

    async def calls() -> str:
        with pytest.raises(DeadlineError):
            await inner.run(partial(asyncio.sleep, 60))
        return "went on"

    assert await outer.run(calls) == "went on"
    with pytest.raises(DeadlineError):
        await bounded().run(partial(bounded(timeout_s=60).run, partial(asyncio.sleep, 60)))
    assert _cancels() == 0


async def test_a_group_of_tasks_inside_fails_as_it_does_elsewhere() -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("one of them")

    async def calls() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())
            await asyncio.sleep(60)

    async def fails_at_the_end() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())
            group.create_task(slow_to_end())

    async def slow_to_end() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)

    with pytest.raises(ExceptionGroup):
        await bounded(timeout_s=60).run(calls)
    with pytest.raises(ExceptionGroup):
        await bounded(timeout_s=60, grace_s=0.001).run(fails_at_the_end)
    assert _cancels() == 0


async def test_a_future_that_somebody_else_cancels_is_the_codes_own_error() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def waits() -> None:
        await future

    asyncio.get_running_loop().call_later(0.001, future.cancel)
    with pytest.raises(RuntimeError, match="cancelled from within"):
        await bounded(timeout_s=60).run(waits)


@pytest.mark.parametrize("waits", [True, False])
async def test_code_that_cancels_itself_is_cancelled(waits: bool) -> None:
    async def cancels() -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        if waits:
            await asyncio.sleep(60)
        return "an answer"

    with pytest.raises(RuntimeError, match="cancelled from within"):
        await bounded(timeout_s=60).run(cancels)
    assert _cancels() == 0


async def test_with_a_clock_only_its_own_time_counts() -> None:
    async def asks() -> str:
        with OwnTime.asked():
            await asyncio.sleep(0.1)
        return "done"

    assert await bounded().run(asks, clock=OwnTime()) == "done"
    with pytest.raises(DeadlineError):
        await bounded().run(lambda: asyncio.sleep(60), clock=OwnTime())


async def test_a_plain_function_that_is_late_is_left_in_its_thread() -> None:
    gate = threading.Event()
    one = bounded()
    with pytest.raises(DeadlineError):
        await one.run(gate.wait)
    assert one.num_abandoned == 1
    gate.set()
    while one.num_abandoned:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def _cancels() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def test_waiting_for_a_thread_is_no_part_of_a_plain_functions_time() -> None:
    bounded = CallWithDeadline(name="few", timeout_s=3.0)
    bounded._threads = DaemonThreads(name="few", max_threads=1)
    assert await asyncio.gather(*(bounded.run(partial(time.sleep, 0.8)) for _ in range(4))) == [None] * 4


async def test_calls_with_deadlines_of_their_own_are_each_late_at_theirs() -> None:
    one, late = bounded(timeout_s=60), list[float]()

    async def is_late(limit_s: float) -> None:
        with pytest.raises(DeadlineError):
            await one.run(partial(asyncio.sleep, 60), timeout_s=limit_s)
        late.append(limit_s)

    quick = asyncio.create_task(one.run(partial(asyncio.sleep, 0.01, "done")))
    await asyncio.gather(*map(is_late, (0.9, 0.1, 0.6, 0.35)))
    assert await quick == "done"
    assert late == [0.1, 0.35, 0.6, 0.9]
