"""Daemon threads: results, errors, size, and calls that are abandoned."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from typing import Any

import pytest

from polyturn.infra.threads import DaemonThreads
from support.refusals import refuses_later

VAR: contextvars.ContextVar[str] = contextvars.ContextVar("VAR", default="unset")


async def occupied(threads: DaemonThreads, *, until: threading.Event, **options: Any) -> asyncio.Task[Any]:
    """Return a call that occupies a thread until an event is set."""
    begun = threading.Event()

    def wait() -> bool:
        begun.set()
        return until.wait()

    running = asyncio.create_task(threads.run(wait, **options))
    await asyncio.to_thread(begun.wait)
    return running


async def test_run_returns_and_raises_what_the_function_does() -> None:
    threads = DaemonThreads(name="t")
    VAR.set("here")
    assert await threads.run(lambda a, *, b: a + b, 1, b=2) == 3
    assert await threads.run(VAR.get) == "here", "context variables are seen"
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 / 0)


@pytest.mark.parametrize("error", [SystemExit, StopIteration, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt])
async def test_error_that_would_end_the_loop_becomes_a_runtime_error(error: type[BaseException]) -> None:
    def leave() -> None:
        raise error("bye")

    await refuses_later(lambda: DaemonThreads(name="t").run(leave), RuntimeError, f"{error.__name__}: bye")


async def test_no_more_than_max_threads_run_at_once() -> None:
    threads, lock, meet = DaemonThreads(name="t", max_threads=3), threading.Lock(), threading.Barrier(3)
    num_running = most = 0

    def work() -> None:
        nonlocal num_running, most
        with lock:
            num_running += 1
            most = max(most, num_running)
        meet.wait()  # three run at once, or none goes on
        with lock:
            num_running -= 1

    await asyncio.gather(*(threads.run(work) for _ in range(12)))
    assert most == 3


async def test_thread_that_cannot_start_takes_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, gate = DaemonThreads(name="full", max_threads=2), threading.Event()
    start, is_full = threading.Thread.start, True

    def limited(thread: threading.Thread) -> None:
        if is_full and thread.name == "polyturn-full":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    for _ in range(3):
        await refuses_later(lambda: threads.run(lambda: 1), RuntimeError, "can't start new thread")
    is_full = False
    async with asyncio.timeout(30):
        running = await occupied(threads, until=gate)
        is_full = True
        waiting = asyncio.create_task(threads.run(lambda: "after it"))
        await asyncio.sleep(0)
        gate.set()
        assert (await running, await waiting) == (True, "after it")


async def test_abandoned_call_is_counted_and_frees_its_thread() -> None:
    threads, gate, late = DaemonThreads(name="t", max_threads=1), threading.Event(), []
    running = await occupied(threads, until=gate, on_late=late.append)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert threads.num_abandoned == 1
    assert await threads.run(lambda: "next") == "next"
    gate.set()
    while threads.num_abandoned or not late:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert late == [True]


@pytest.mark.parametrize("is_owed", [False, True])
async def test_cancelled_call_that_has_not_begun_runs_only_if_owed(is_owed: bool) -> None:
    threads, gate, ran = DaemonThreads(name="t", max_threads=1), threading.Event(), []
    first = await occupied(threads, until=gate)
    second = asyncio.create_task(threads.run(ran.append, 1, is_owed=is_owed))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    gate.set()
    assert await first is True
    assert await threads.run(lambda: "after") == "after", "the one thread comes to this call last"
    assert ran == [1] * is_owed
    assert threads.num_abandoned == 0


async def test_result_that_arrives_during_a_cancellation_is_handed_over() -> None:
    threads, late, next_begun = DaemonThreads(name="t", max_threads=1), [], threading.Event()
    task = asyncio.create_task(threads.run(lambda: "made", on_late=late.append))
    following = asyncio.create_task(threads.run(next_begun.set))
    await asyncio.sleep(0)
    next_begun.wait()  # the first call has ended, but the event loop, which is blocked here, does not know
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert late == ["made"]
    await following


async def test_idle_threads_end_and_new_work_starts_new_ones() -> None:
    threads = DaemonThreads(name="idle", idle_s=0.01)
    for _ in range(3):
        thread = await threads.run(threading.current_thread)
        assert thread.name == "polyturn-idle"
        await asyncio.to_thread(thread.join)


async def test_owed_call_that_raises_is_not_reported_as_lost() -> None:
    threads, gate, reports = DaemonThreads(name="t", max_threads=1), threading.Event(), []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context["message"]))
    first = await occupied(threads, until=gate)
    owed = asyncio.create_task(threads.run(lambda: 1 / 0, is_owed=True))
    await asyncio.sleep(0)
    owed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await owed
    gate.set()
    await first
    await threads.run(lambda: None)
    gc.collect()
    assert reports == []
