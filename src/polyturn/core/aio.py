"""Small helpers for asyncio that more than one package needs."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


def loop_clock() -> Callable[[], float]:
    """Return the clock of the running event loop, or the monotonic clock if none runs; they differ only in virtual time."""
    try:
        return asyncio.get_running_loop().time
    except RuntimeError:
        return time.monotonic


@contextmanager
def first_error() -> Iterator[None]:
    """Raise the first real error of an exception group instead of the group, which becomes its cause.

    A `TaskGroup` wraps what its tasks raise; callers of the library expect the error itself.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        raise _leaf(group) from group


def _leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    leaves: list[BaseException] = []
    stack: list[BaseException] = [group]
    while stack:
        error = stack.pop()
        if isinstance(error, BaseExceptionGroup):
            stack.extend(reversed(error.exceptions))
        else:
            leaves.append(error)
    # Tasks that were cancelled because another failed say nothing of the reason.
    real = [e for e in leaves if not isinstance(e, asyncio.CancelledError)]
    return (real or leaves)[0]


class PerLoop(Generic[T]):
    """One object for each event loop, such as a lock, which belongs to the loop that first waited for it."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: tuple[asyncio.AbstractEventLoop, T] | None = None

    def __call__(self) -> T:
        """Return it, made when a loop first asks."""
        loop = asyncio.get_running_loop()
        if self._made is None or self._made[0] is not loop:
            self._made = loop, self._make()
        return self._made[1]


class OneThread:
    """One daemon thread that runs one function after another, for work that must not hold the event loop up.

    Always the same thread, because native libraries keep a pool of threads for each thread that calls them.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run `function` in the thread; return a future of the running event loop."""
        loop = asyncio.get_running_loop()
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
            asyncio.CancelledError: the caller was cancelled before the function began, so that it never does.
        """
        turn = threading.Lock()  # taken for good by the first of two: the beginning, or the cancellation

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
        """Run `function` in the thread and return its result, as `finish` does."""
        result, cancelled = await self.finish(function)
        if cancelled is not None:
            raise cancelled
        return result

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Keep the thread from beginning work inside; what it does at the moment ends first."""
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
    """The result or error of awaited work."""

    result: T
    cancelled: asyncio.CancelledError | None
    """Set where the caller was cancelled meanwhile; raise it once what the work did is recorded."""


async def finish(work: asyncio.Future[T], *, grace_s: float | None = None) -> Finished[T]:
    """Wait for `work` to its end even while the caller is cancelled: for what must not be left half done.

    Args:
        work: A task, which is not cancelled.
        grace_s: How long it is waited for once the caller is cancelled; None is for as long as it takes.

    Raises:
        asyncio.CancelledError: the caller was cancelled, and the work goes on by itself after `grace_s`.
        Exception: the work's own error. If the caller was cancelled meanwhile, that is its `__context__`, as where a
            `finally` raises; a caller that goes on after errors asks `cancelling()` of its task.
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
