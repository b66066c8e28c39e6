"""LoopBridge: synchronous access to an episode's event loop, for a scheduler's plain methods, which run in threads.

    thread       turn = episode.wait(episode.generate())  --->  waits
    event loop                                            await episode.generate()

No thread keeps waiting after its episode ends: pending calls are cancelled, and later calls are refused.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable
from typing import Any, TypeVar

from polyturn.core.errors import LifecycleError, SchedulerError

_Result = TypeVar("_Result")


class LoopBridge:
    """Runs coroutines on an episode's event loop for its threads; forks share one bridge."""

    __slots__ = ("_loop", "_waiting", "is_closed")

    def __init__(self) -> None:
        """Start without an event loop; `enter` binds one."""
        self.is_closed = False
        """Whether the episode has ended; calls are then refused."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: set[concurrent.futures.Future[Any]] = set()
        """Futures on which threads are waiting."""

    def enter(self) -> None:
        """Bind to the running event loop."""
        self._loop = asyncio.get_running_loop()

    def wait(self, awaitable: Awaitable[_Result], *, of: str) -> _Result:
        """Await on the event loop, and return the result to the calling thread.

        Args:
            awaitable: The object to await. If the call is refused, a coroutine is closed, so that Python does not warn.
            of: The episode's id, for messages.

        Raises:
            SchedulerError: the caller runs on the event loop, which would then wait for itself.
            LifecycleError: the episode has ended.
        """
        if self._loop is None or _is_on_a_loop():
            _discard(awaitable)
            raise SchedulerError("`wait` is for plain methods, which run in a thread; in an async method, use await")

        def refuse_late() -> None:
            if self.is_closed:
                _discard(awaitable)
                raise LifecycleError(f"episode {of!r} has ended; a call that ran past its deadline still uses it")

        async def run() -> _Result:
            refuse_late()
            return await awaitable

        refuse_late()  # and again on the loop: the episode may end before the loop runs the call
        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        self._waiting.add(future)
        if self.is_closed:  # the episode ended before `close` could see this future
            future.cancel()
        try:
            return future.result()
        finally:
            self._waiting.discard(future)

    def close(self) -> None:
        """Release every waiting thread, because the episode has ended."""
        self.is_closed = True
        for future in list(self._waiting):
            future.cancel()


def _is_on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _discard(awaitable: Awaitable[Any]) -> None:
    """Close a coroutine that will never be awaited."""
    if asyncio.iscoroutine(awaitable):
        awaitable.close()
