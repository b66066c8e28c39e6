"""Work in its own thread, its cancellation by the caller, and the pace of calls."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from polyturn.infra.aio import OneThread, Pace, finish, in_background
from support.refusals import refuses_later
from support.virtual_time import run_virtual


async def test_one_thread_runs_in_order_and_raises_errors():
    thread = OneThread("test")
    names = [await thread.submit(lambda: threading.current_thread().name) for _ in range(3)]
    assert names == ["test"] * 3

    def fail() -> None:
        raise ValueError("no")

    await refuses_later(lambda: thread.submit(fail), ValueError, "no")


async def test_held_thread_begins_nothing():
    thread, done, begun, go = OneThread("test"), [], threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert go.wait(60)
        done.append("before")

    async def hold() -> None:
        async with thread.held():
            raise AssertionError("it works")

    before = thread.submit(work)
    await asyncio.to_thread(begun.wait, 60)
    given_up = asyncio.create_task(hold())
    await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    go.set()
    async with thread.held():
        assert done == ["before"]
        after = thread.submit(lambda: done.append("after"))
        await asyncio.sleep(0.05)
        assert done == ["before"]
    await asyncio.gather(before, after)
    assert done == ["before", "after"]


async def test_finish_waits_for_work_and_keeps_the_cancellation():
    thread, done, begun, go = OneThread("test"), [], threading.Event(), threading.Event()

    def train() -> str:
        begun.set()
        assert go.wait(60)
        return "trained"

    async def step() -> None:
        result, cancelled = await finish(thread.submit(train))
        done.append(result)
        assert cancelled is not None
        raise cancelled

    running = asyncio.create_task(step())
    await asyncio.to_thread(begun.wait, 60)
    running.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert done == ["trained"]


@pytest.mark.parametrize("waits_by", ["run", "finish"])
async def test_work_that_has_not_begun_is_cancelled_at_once(waits_by: str):
    thread, done = OneThread("test"), []
    async with asyncio.timeout(30), thread.held():
        waiting = asyncio.create_task(getattr(thread, waits_by)(lambda: done.append("it ran")))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
    await thread.run(lambda: None)
    assert waiting.cancelled() and done == []


@pytest.mark.parametrize("waits_by", ["run", "finish", "a task"])
async def test_error_of_work_keeps_the_cancellation_as_context(waits_by: str):
    thread, begun, go = OneThread("test"), threading.Event(), threading.Event()

    def fail() -> None:
        begun.set()
        assert go.wait(60)
        raise ValueError("no memory")

    working = finish(thread.submit(fail)) if waits_by == "a task" else getattr(thread, waits_by)(fail)
    running = asyncio.create_task(working)
    await asyncio.to_thread(begun.wait, 60)
    running.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(ValueError, match="no memory") as caught:
        await running
    assert isinstance(caught.value.__context__, asyncio.CancelledError)
    assert running.cancelling() == 1, "a caller that goes on after errors can ask"


def test_calls_are_let_through_evenly() -> None:
    async def times() -> list[float]:
        pace, at = Pace(4), []
        for _ in range(4):
            await pace.wait()
            at.append(asyncio.get_running_loop().time())
        return at

    assert run_virtual(times()) == [0.0, 0.25, 0.5, 0.75]


async def running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_background_work_of_one_thread_shares_its_loop() -> None:
    with ThreadPoolExecutor(8) as callers:
        loops = list(callers.map(lambda number: in_background(running_loop(), thread=f"t{number % 2}"), range(64)))
    assert [len(set(loops[::2])), len(set(loops[1::2])), len(set(loops))] == [1, 1, 2]
