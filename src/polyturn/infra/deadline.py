"""Runs an author's code with a deadline that holds even if the code ignores its cancellation.

    its task ──▶ code runs ──▶ ends without waiting: there is no further cost
                          └──▶ waits, until the deadline or the caller cancels it; then it has a short grace period to clean
                               up, and is abandoned and counted if it still runs after that

Each call is a separate task, started at once if Python can (3.12). Plain functions run in daemon threads instead of on the
event loop, and their deadline begins when they start. Code that may wait for an engine for minutes has a deadline for each
stretch in which it works by itself:

    async def step(self, episode, turn):       0 s
        more = await search(turn.text)         its own time
        await episode.generate()               the library's: the stretch is paused, and starts again at 0
        return summarise(more)                 its own time
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

from polyturn.core.errors import RolloutError, one_line
from polyturn.infra.aio import PerLoop, loop_clock
from polyturn.infra.threads import DaemonThreads

GRACE_S = 1.0
"""Seconds that cancelled code may take to clean up."""
MAX_ABANDONED = 64
"""The most calls of one plug-in that may run past their deadline; with more, the run ends."""
_ROUNDING_S = 1e-6
"""Seconds below which a rest is a rounding error: a timer for it could ring at the same reading of the clock for ever."""

_BEGIN_AT_ONCE: dict[str, Any] = {"eager_start": True} if sys.version_info >= (3, 12) else {}


_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

_STRETCHES: ContextVar[tuple[Stretch, ...]] = ContextVar("polyturn_stretches", default=())
"""The stretches of the calls that the running code is part of."""


class Stretch:
    """Measures how long a call of an author's code, including the tasks that it starts, has worked by itself."""

    __slots__ = ("_now", "_num_paused", "_since")

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        """Start the clock. `now` returns the time in seconds; by default it is the clock of the running event loop."""
        self._now = now or loop_clock()
        self._num_paused = 0
        self._since = self._now()

    @property
    def seconds(self) -> float:
        """Seconds since the code's last call of the library returned; 0 while such a call runs."""
        return 0.0 if self._num_paused else self._now() - self._since

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make this the stretch of all calls and tasks that start inside the block."""
        token = _STRETCHES.set((*_STRETCHES.get(), self))
        try:
            yield
        finally:
            _STRETCHES.reset(token)

    def from_its_begin(self, work: Callable[[], _Result]) -> Callable[[], _Result]:
        """Wrap a plain function so that the clock starts when the function does, not while it waits for a thread."""
        self._num_paused += 1

        def begun() -> _Result:
            self._num_paused -= 1
            self._since = self._now()
            return work()

        return begun

    @staticmethod
    @contextmanager
    def paused() -> Iterator[None]:
        """Pause the stretches of all callers inside the block, in which the library works for them."""
        stretches = _STRETCHES.get()
        for one in stretches:
            one._num_paused += 1
        try:
            yield
        finally:
            for one in stretches:
                one._num_paused -= 1
                one._since = one._now()


def pauses_stretch(method: Callable[_Args, Awaitable[_Result]]) -> Callable[_Args, Awaitable[_Result]]:
    """Mark an async method of the library that plug-ins await; its time does not count for the plug-in's deadline."""

    async def paused(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        with Stretch.paused():
            return await method(*args, **kwargs)

    @functools.wraps(method)
    def call(*args: _Args.args, **kwargs: _Args.kwargs) -> Awaitable[_Result]:
        return paused(*args, **kwargs) if _STRETCHES.get() else method(*args, **kwargs)

    return call


class DeadlineError(Exception):
    """The code did not finish before its deadline."""


class CallWithDeadline:
    """Runs coroutines and plain functions of plug-ins, and counts abandoned calls."""

    def __init__(self, *, name: str, timeout_s: float, grace_s: float = GRACE_S, max_threads: int = 64) -> None:
        self.timeout_s = timeout_s
        self.max_abandoned = MAX_ABANDONED
        self._grace_s = grace_s
        self._threads = DaemonThreads(name=name, max_threads=max_threads)
        self._left: set[asyncio.Future[Any]] = set()
        self._alarms = PerLoop(_Alarms)

    @property
    def num_abandoned(self) -> int:
        """Number of late calls that still run after their caller stopped waiting."""
        return self._threads.num_abandoned + len(self._left)

    def check_abandoned(self, what: str) -> None:
        """Check the number of abandoned calls; `what` names the code in the message.

        Raises:
            RolloutError: too many calls were abandoned.
        """
        if self.num_abandoned > self.max_abandoned:
            raise RolloutError(
                f"{self.num_abandoned} calls of {what} still run past their deadline; set a timeout on the requests that "
                "they wait for"
            )

    def close(self) -> None:
        self._threads.close()

    async def call(
        self, work: Callable[[], Any], *, on_late: Callable[[Any], None] | None = None, is_owed: bool = False
    ) -> Any:
        """Call an async or plain function without arguments; a plain one runs in a thread and may return an awaitable."""
        try:
            if inspect.iscoroutinefunction(work):
                return await work()
            result = await self._threads.run(work, on_late=on_late, is_owed=is_owed)
            return await result if inspect.isawaitable(result) else result
        except SystemExit as problem:  # would end the event loop
            raise RuntimeError(one_line(problem)) from problem

    async def run(
        self,
        work: Callable[[], Any],
        *,
        timeout_s: float | None = None,
        stretch: Stretch | None = None,
        on_late: Callable[[Any], None] | None = None,
        is_owed: bool = False,
    ) -> Any:
        """Call a function like `call`, with a deadline.

        Args:
            work: The function; `functools.partial` gives a method its arguments.
            timeout_s: The deadline in seconds; None is the default of this object.
            stretch: If given, the deadline applies to each stretch in which `work` runs without calling the library.
            on_late: Called with the result of a plain function that ends after its deadline.
            is_owed: Whether a plain function runs even if a thread becomes free only after the deadline.

        Raises:
            DeadlineError: `work` did not finish in time.
            Exception: the error of `work`; a CancelledError or SystemExit becomes a RuntimeError.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        caller = asyncio.current_task()
        name = None if caller is None else caller.get_name()  # the episode's, which the loop monitor names
        clock = Stretch() if stretch is None else stretch
        if not inspect.iscoroutinefunction(work):
            work = clock.from_its_begin(work)
        with nullcontext() if stretch is None else stretch.running():
            called = self.call(work, on_late=on_late, is_owed=is_owed)
            task = asyncio.Task(called, loop=asyncio.get_running_loop(), name=name, **_BEGIN_AT_ONCE)
        try:
            rest_s = limit_s
            while not task.done() and rest_s > _ROUNDING_S:
                await self._alarms().wait(task, rest_s)
                rest_s = limit_s - clock.seconds
            if not task.done():
                await self._stop(task)
                raise DeadlineError(f"it took longer than {limit_s:g} s")
        except asyncio.CancelledError:
            await self._stop(task)
            raise
        if task.cancelled():
            raise RuntimeError("CancelledError: the code cancelled itself")
        problem = task.exception()
        if problem is not None and not isinstance(problem, Exception):  # raised as it is, it would end the run
            raise RuntimeError(one_line(problem)) from problem
        return task.result()

    async def _stop(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        try:
            await asyncio.wait({task}, timeout=self._grace_s)
        finally:
            if task.done():
                _ = task.cancelled() or task.exception()  # so that asyncio does not log the error as never retrieved
            else:
                self._left.add(task)
                task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._left.discard(task)
        _ = task.cancelled() or task.exception()


class _Alarms:
    """Timeouts of all running calls with a single timer, because one timer per call costs as much as its task."""

    def __init__(self) -> None:
        self._due: dict[asyncio.Future[None], float] = {}
        """Waiting future -> loop time at which it is woken unless its call ends first."""
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, task: asyncio.Task[Any], seconds: float) -> None:
        """Wait until `task` is done, or for `seconds`."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        task.add_done_callback(functools.partial(_wake, woken))
        self._due[woken] = due = loop.time() + seconds
        if self._timer is None or due < self._timer.when():
            self._set(loop, due)
        try:
            await woken
        finally:
            del self._due[woken]

    def _set(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(due, self._ring, loop)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the waiters whose time is up, and set the timer for the next one."""
        self._timer, now = None, loop.time()
        later = [due for due in self._due.values() if due > now]
        for woken, due in self._due.items():
            if due <= now:
                _wake(woken)
        if later:
            self._set(loop, min(later))


def _wake(woken: asyncio.Future[None], _: object = None) -> None:
    if not woken.done():
        woken.set_result(None)
