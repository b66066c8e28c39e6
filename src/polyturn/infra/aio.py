"""Small helpers for asyncio that more than one package needs."""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


def loop_clock() -> Callable[[], float]:
    """Return the clock of the running event loop (virtual in tests), or the monotonic clock if no loop runs."""
    try:
        return asyncio.get_running_loop().time
    except RuntimeError:
        return time.monotonic


@contextmanager
def first_error() -> Iterator[None]:
    """Raise the first real error of an exception group instead of the group, which becomes its cause.

    A `TaskGroup` wraps the errors of its tasks in a group; callers of the library expect the error itself.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        raise _leaf(group) from group


def _leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    # The CancelledError of a task that was cancelled because another task failed does not show the reason.
    error: BaseException = group.subgroup(lambda e: not isinstance(e, BaseExceptionGroup | asyncio.CancelledError)) or group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class Pace:
    """Spaces calls evenly, at most `per_second`; each call's time is fixed when `wait` is called."""

    def __init__(self, per_second: float) -> None:
        self._gap_s = 1.0 / per_second
        self._free_at = 0.0

    async def wait(self) -> None:
        """Wait for this call's time."""
        now = asyncio.get_running_loop().time()
        start = max(now, self._free_at)
        self._free_at = start + self._gap_s
        if start > now:
            await asyncio.sleep(start - now)


class PerLoop(Generic[T]):
    """Holds one object for the running event loop, such as a lock, which works only in the loop that first waited for it."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: tuple[asyncio.AbstractEventLoop, T] | None = None

    def __call__(self) -> T:
        """Return the object of the running loop; the first call in a loop makes it."""
        loop = asyncio.get_running_loop()
        if self._made is None or self._made[0] is not loop:
            self._made = loop, self._make()
        return self._made[1]


class OneThread:
    """Runs functions one after another in a daemon thread, for work that must not block the event loop.

    It is always the same thread, because native libraries keep a pool of threads for each thread that calls them.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run `function` in the thread; return a future of the running event loop."""
        self._loop = loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(set_it: Callable[[], None]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(lambda: None if future.done() else set_it())

        def work() -> None:
            try:
                result = function()
            except BaseException as problem:
                error = problem
                settle(lambda: future.set_exception(error))
            else:
                settle(lambda: future.set_result(result))

        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._work.put(work)
        return future

    async def finish(self, function: Callable[[], T]) -> Finished[T]:
        """Run `function` in the thread and wait for its end, even while the caller is cancelled.

        Raises:
            asyncio.CancelledError: the caller was cancelled before the function began; the function will not run.
        """
        turn = threading.Lock()  # never released: kept by the start or by the cancellation, whichever comes first

        def begin() -> T:
            if not turn.acquire(blocking=False):
                raise asyncio.CancelledError
            return function()

        work = self.submit(begin)
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as cancelled:
            if turn.acquire(blocking=False):
                work.cancel()
                raise
            return Finished((await finish(work)).result, cancelled)
        return Finished(work.result(), None)

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` in the thread and return its result; a cancelled caller still waits for its end, as in `finish`."""
        result, cancelled = await self.finish(function)
        if cancelled is not None:
            raise cancelled
        return result

    def await_in_loop(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `function` in the event loop that waits for the thread, and return its result; for work in the thread."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(function(), self._loop).result()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Wait until the thread is idle, and keep it from starting other work inside the block."""
        is_held, may_go_on = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def wait() -> None:
            loop.call_soon_threadsafe(is_held.set)
            may_go_on.wait()

        try:
            self.submit(wait)
            await is_held.wait()
            yield
        finally:
            may_go_on.set()

    def _run(self) -> None:
        while True:
            self._work.get()()


class Finished(NamedTuple, Generic[T]):
    """The result of awaited work, and the cancellation of its caller."""

    result: T
    cancelled: asyncio.CancelledError | None
    """Set if the caller was cancelled before the work ended; raise it after recording the result."""


async def finish(work: asyncio.Future[T], *, grace_s: float | None = None) -> Finished[T]:
    """Wait until `work` ends, even if the caller is cancelled: for work that must not be left half done.

    Args:
        work: A task; it is not cancelled.
        grace_s: Seconds to wait for the task after the caller is cancelled; None waits until it ends.

    Raises:
        asyncio.CancelledError: the caller was cancelled and `grace_s` passed; the task continues by itself.
        Exception: the error of the task. If the caller was cancelled meanwhile, the cancellation is the error's
            `__context__`. A caller that continues after errors must check `cancelling()` of its task.
    """
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            done, _ = await asyncio.wait({work}, timeout=None if cancelled is None else grace_s)
        except asyncio.CancelledError as problem:
            cancelled = problem
        else:
            if cancelled is not None and not done:
                raise cancelled
    if cancelled is not None and not work.cancelled() and (error := work.exception()) is not None:
        error.__context__ = cancelled
    return Finished(work.result(), cancelled)


def in_own_loop(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run `work()` to its end from synchronous code, in a new event loop, and return its result or raise its error."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(asyncio.run(work()))
        except BaseException as problem:
            outcome.set_exception(problem)

    threading.Thread(target=run, name="polyturn-own-loop", daemon=True).start()
    return outcome.result()


_STARTING = threading.Lock()
"""Held while a loop is looked up, so that concurrent first calls get the same one."""


def in_background(work: Coroutine[Any, Any, Any], *, thread: str) -> Any:
    """Run `work` to its end from synchronous code, in the event loop of a named thread, and return its result.

    The first call starts the thread, which never ends: for objects that outlive the call.
    """
    with _STARTING:
        loop = _background_loop(thread)
    return asyncio.run_coroutine_threadsafe(work, loop).result()


@functools.cache
def _background_loop(thread: str) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=thread, daemon=True).start()
    return loop
