"""Daemon threads: results, errors, size, and calls that nobody waits for any more."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import time

import pytest

from polyturn.infra.threads import DaemonThreads

VAR: contextvars.ContextVar[str] = contextvars.ContextVar("VAR", default="unset")


async def test_it_returns_and_raises_what_the_function_does() -> None:
    threads = DaemonThreads(name="t")
    assert await threads.run(lambda a, *, b: a + b, 1, b=2) == 3
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 / 0)


@pytest.mark.parametrize("error", [SystemExit, StopIteration, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt])
async def test_errors_that_would_end_the_loop_or_vanish_become_runtime_errors(error: type[BaseException]) -> None:
    def leave() -> None:
        raise error("bye")

    with pytest.raises(RuntimeError, match=f"{error.__name__}: bye"):
        await DaemonThreads(name="t").run(leave)


async def test_context_variables_are_seen() -> None:
    VAR.set("here")
    assert await DaemonThreads(name="t").run(VAR.get) == "here"


async def test_no_more_threads_than_asked_for_run_at_once() -> None:
    threads, lock, now, most = DaemonThreads(name="t", max_threads=3), threading.Lock(), 0, 0

    def work() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= 1

    await asyncio.gather(*(threads.run(work) for _ in range(12)))
    assert most == 3


async def test_an_abandoned_call_is_counted_and_gives_its_place_away() -> None:
    threads, gate, late = DaemonThreads(name="t", max_threads=1), threading.Event(), []
    begun = threading.Event()
    running = asyncio.create_task(threads.run(lambda: begun.set() or gate.wait(), on_late=late.append))
    await asyncio.to_thread(begun.wait)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert threads.num_abandoned == 1
    assert await threads.run(lambda: "next") == "next"
    gate.set()
    while threads.num_abandoned or not late:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert late == [True]


async def test_a_call_that_has_not_begun_never_does() -> None:
    threads, gate, ran = DaemonThreads(name="t", max_threads=1), threading.Event(), []
    first = asyncio.create_task(threads.run(gate.wait))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(threads.run(ran.append, 1))
    await asyncio.sleep(0.01)
    second.cancel()
    await asyncio.sleep(0)
    gate.set()
    assert await first is True
    assert await threads.run(lambda: "after") == "after"
    assert ran == []
    assert threads.num_abandoned == 0


async def test_a_result_that_arrives_during_a_cancellation_is_handed_over() -> None:
    threads, late = DaemonThreads(name="t"), []
    task = asyncio.create_task(threads.run(lambda: "made", on_late=late.append))
    await asyncio.sleep(0)
    time.sleep(0.05)  # noqa: ASYNC251  the thread ends while the loop cannot know
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert late == ["made"]


async def test_idle_threads_end_and_new_work_starts_new_ones() -> None:
    threads = DaemonThreads(name="idle", idle_s=0.01)
    for _ in range(3):
        assert await threads.run(lambda: 1) == 1
        await asyncio.sleep(0.05)
    assert not [t for t in threading.enumerate() if t.name == "polyturn-idle"]


@pytest.mark.parametrize("is_owed", [False, True])
async def test_a_call_that_is_owed_runs_later_even_if_its_turn_comes_after_the_caller_has_left(is_owed: bool) -> None:
    threads, gate, done = DaemonThreads(name="t", max_threads=1), threading.Event(), threading.Event()
    first = asyncio.create_task(threads.run(gate.wait))
    second = asyncio.create_task(threads.run(done.set, is_owed=is_owed))
    await asyncio.sleep(0.02)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    gate.set()
    await first
    assert await asyncio.to_thread(done.wait, 5.0 if is_owed else 0.2) is is_owed


async def test_what_is_owed_and_breaks_when_nobody_waits_is_not_reported_as_lost() -> None:
    threads, gate, said = DaemonThreads(name="t", max_threads=1), threading.Event(), []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context["message"]))
    first = asyncio.create_task(threads.run(gate.wait))
    await asyncio.sleep(0.01)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await threads.run(lambda: 1 / 0, is_owed=True)
    gate.set()
    await first
    await threads.run(lambda: None)
    gc.collect()
    assert said == []
