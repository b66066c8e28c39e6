"""Run an author's code with a deadline that holds even if the code ignores being cancelled.

Each call is a task of its own: its deadline cancels it, a short grace lets it clean up, and one that still runs is left
behind and counted. Plain functions run in daemon threads instead of on the event loop.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from polyturn.tools.threads import DaemonThreads

GRACE_S = 1.0
"""How long cancelled code may take to clean up."""


class DeadlineError(Exception):
    """The code was not done in time."""


class Bounded:
    """Runs coroutines and plain functions of plug-ins, and counts what was left behind."""

    def __init__(self, *, name: str, timeout_s: float, grace_s: float = GRACE_S) -> None:
        self.timeout_s = timeout_s
        self._grace_s = grace_s
        self._threads = DaemonThreads(name=name)
        self._left: set[asyncio.Task[Any]] = set()

    @property
    def num_abandoned(self) -> int:
        """How many calls run on although nobody waits for them any more."""
        return self._threads.num_abandoned + len(self._left)

    async def call(
        self,
        method: Callable[..., Any],
        /,
        *args: Any,
        on_late: Callable[[Any], None] | None = None,
        is_owed: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Call an async or plain method; a plain one runs in a thread, and may return something to await."""
        if inspect.iscoroutinefunction(method):
            return await method(*args, **kwargs)
        result = await self._threads.run(method, *args, on_late=on_late, is_owed=is_owed, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async def run(
        self,
        method: Callable[..., Any],
        /,
        *args: Any,
        on_late: Callable[[Any], None] | None = None,
        is_owed: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Do what `call` does, with the deadline; a plain method that `is_owed` runs even if its turn comes too late.

        Raises:
            DeadlineError: it was not done in `timeout_s`.
            Exception: whatever `method` raised; its own CancelledError and SystemExit come as RuntimeError.
        """
        task = asyncio.create_task(self._guarded(method, *args, on_late=on_late, is_owed=is_owed, **kwargs))
        try:
            await asyncio.wait({task}, timeout=self.timeout_s)
            if not task.done():
                await self._stop(task)
                raise DeadlineError(f"it took longer than {self.timeout_s:g} s")
        except asyncio.CancelledError:
            await self._stop(task)
            raise
        if task.cancelled():
            raise RuntimeError("CancelledError: it was cancelled from within")
        return task.result()

    async def _guarded(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        try:
            return await self.call(method, *args, **kwargs)
        except SystemExit as problem:  # would end the event loop
            raise RuntimeError(f"SystemExit: {problem}") from problem

    async def _stop(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        try:
            await asyncio.wait({task}, timeout=self._grace_s)
        finally:
            if task.done():
                _ = task.cancelled() or task.exception()  # seen, so that asyncio does not report it again
            else:
                self._left.add(task)
                task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._left.discard(task)
        _ = task.cancelled() or task.exception()
