"""AuthorCalls: calls the methods of a scheduler, which its author may write as coroutines or as plain functions.

A coroutine runs on the event loop. A plain function runs in a daemon thread with a deadline, so that `time.sleep`, a
request or a simulator in a `step` blocks no other episode; one scheduler object that is shared by all episodes is called
by one thread at a time. Methods that the library itself wrote are quick and called where they are.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any

from polyturn.core.errors import PolyturnError, RolloutError, SchedulerError, one_line
from polyturn.tools.threads import DaemonThreads

MAX_THREADS = 1024
"""Plain methods that run at once; beyond it they wait. `run` keeps one for as long as its episode lives."""


class AuthorCalls:
    """Calls scheduler methods for all episodes of a run."""

    def __init__(self, *, timeout_s: float, max_abandoned: int = 64) -> None:
        """Prepare the threads.

        Args:
            timeout_s: Deadline of every plain method but `run`, which the episode's own time limit ends.
            max_abandoned: How many calls past their deadline may be running before the run ends.
        """
        self.timeout_s = timeout_s
        self._max_abandoned = max_abandoned
        self._threads = DaemonThreads(name="scheduler", max_threads=MAX_THREADS)
        self._turn_taking: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    async def call(
        self,
        method: Callable[..., Any],
        *args: Any,
        is_shared: bool = False,
        has_deadline: bool = True,
        of: str = "the scheduler's",
        **kwargs: Any,
    ) -> Any:
        """Call `method` and return what it returns, awaited.

        Args:
            method: Of a scheduler, plain or async.
            args: Its arguments.
            is_shared: Whether its object serves all episodes, so that plain methods take turns.
            has_deadline: Whether a plain method has the deadline.
            of: Whose method it is, for messages.
            kwargs: Its keyword arguments.

        Raises:
            SchedulerError: it raised something that is not of the library, or was late.
            RolloutError: too many calls run on past their deadline.
        """
        name = f"{of} {method.__name__}"
        if kwargs:
            method = functools.update_wrapper(functools.partial(method, **kwargs), method)
        try:
            if is_ours(method) or inspect.iscoroutinefunction(method):
                answer = method(*args)
            elif is_shared:
                async with self._lock():
                    answer = await self._in_thread(name, method, *args, has_deadline=has_deadline)
            else:
                answer = await self._in_thread(name, method, *args, has_deadline=has_deadline)
            return await answer if inspect.isawaitable(answer) else answer
        except PolyturnError:
            raise
        except Exception as problem:
            raise SchedulerError(f"{name} raised {one_line(problem)}") from problem

    async def _in_thread(self, name: str, method: Callable[..., Any], *args: Any, has_deadline: bool) -> Any:
        """Call a plain method; what it gives to await is no part of its deadline."""
        self._check_abandoned(name)
        clock = asyncio.timeout(self.timeout_s if has_deadline else None)
        try:
            async with clock:
                return await self._threads.run(method, *args)
        except TimeoutError as problem:
            if not clock.expired():
                raise
            self._check_abandoned(name)
            raise SchedulerError(
                f"{name} took longer than {self.timeout_s:g} s; raise rollout.scheduler_timeout_s or make it quicker"
            ) from problem

    def _check_abandoned(self, name: str) -> None:
        if self._threads.num_abandoned > self._max_abandoned:
            raise RolloutError(
                f"{self._threads.num_abandoned} calls of {name} still run past their deadline; give what it waits for a "
                "time-out of its own"
            )

    def _lock(self) -> asyncio.Lock:
        loop = asyncio.get_running_loop()
        if self._turn_taking is None or self._turn_taking[0] is not loop:
            self._turn_taking = loop, asyncio.Lock()
        return self._turn_taking[1]


def is_ours(method: Callable[..., Any]) -> bool:
    """Return whether a method of a scheduler is the library's own, which never blocks."""
    return method.__module__ == "polyturn.rollout.scheduler"
