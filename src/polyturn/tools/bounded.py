"""Run an author's code with a deadline that holds even if the code ignores being cancelled.

    the episode's task ──▶ code runs ──▶ it is done without having waited:   nothing else is paid for
                                    └──▶ it waits: a timer runs
                                            the timer, or the episode, cancels it: a short grace to clean up
                                            it still runs: a task of its own takes it over, left behind and counted

A coroutine is driven step by step in the task that calls it, because a task and a timer for every call of code that mostly
answers at once cost more than the answer. Plain functions run in daemon threads instead of on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any

from polyturn.core.own_time import OwnTime
from polyturn.core.watchdog import calls_plugins
from polyturn.tools.threads import DaemonThreads

GRACE_S = 1.0
"""How long cancelled code may take to clean up."""
FOREVER_S = 1e9
"""What stands for no deadline in a timer."""


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

    def close(self) -> None:
        """Let its idle threads end."""
        self._threads.close()

    @calls_plugins
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
        return await self.run_for(functools.partial(method, *args, **kwargs), on_late=on_late, is_owed=is_owed)

    async def run_for(
        self,
        work: Callable[[], Any],
        *,
        timeout_s: float | None = None,
        clock: OwnTime | None = None,
        on_late: Callable[[Any], None] | None = None,
        is_owed: bool = False,
    ) -> Any:
        """Do what `run` does, for a function of nothing and with another deadline.

        Args:
            work: The function.
            timeout_s: Its deadline; None is the usual one.
            clock: The deadline is for what it does by itself at a stretch, between what it asks of the library.
            on_late: Is told the result of a plain function that ends after all.
            is_owed: A plain function runs even if its turn comes too late.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        call = self.call(work, on_late=on_late, is_owed=is_owed)
        drive = _Drive(call, limit_s=limit_s, grace_s=self._grace_s, clock=clock)
        if clock is None:
            return await drive.to_the_end(self._leave)
        with clock.running():
            return await drive.to_the_end(self._leave)

    def _leave(self, task: asyncio.Task[Any]) -> None:
        self._left.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._left.discard(task)
        _ = task.cancelled() or task.exception()  # seen, so that asyncio does not report it


class _Drive:
    """One coroutine on its way, step by step in the task that waits for it."""

    __slots__ = ("_clock", "_deadline", "_grace", "_grace_s", "_is_due", "_is_left", "_limit_s", "_task", "_work")

    def __init__(self, work: Coroutine[Any, Any, Any], *, limit_s: float, grace_s: float, clock: OwnTime | None) -> None:
        self._work = work
        self._limit_s, self._grace_s = limit_s, grace_s
        self._clock = clock
        self._task: Any = None
        self._deadline: asyncio.TimerHandle | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._is_due = self._is_left = False
        """Whether the deadline, and the grace after a cancellation, are over: each cancels the task once."""

    @coroutine
    def to_the_end(self, leave: Callable[[asyncio.Task[Any]], None]) -> Generator[Any, Any, Any]:
        """Go on until it is done or left behind; what it waits for goes to the event loop, and what comes of it back.

        Who cancelled is told by the number of cancellations that nobody took back: its own time-outs take theirs back.
        """
        work, task = self._work, asyncio.current_task()
        assert task is not None
        self._task, num_before = task, task.cancelling()
        thrown: BaseException | None = None
        try:
            while not self._is_left:
                try:
                    waits_for = work.send(None) if thrown is None else work.throw(thrown)
                except StopIteration as end:
                    self._judge(None, num_before)
                    return end.value
                except BaseException as raised:
                    self._judge(raised, num_before)
                    raise
                finally:
                    thrown = None  # it holds this frame
                self._set_timers(is_cancelled=task.cancelling() > num_before)
                try:
                    yield waits_for
                except GeneratorExit:
                    work.close()
                    raise
                except BaseException as raised:
                    thrown = raised
                    self._set_timers(is_cancelled=task.cancelling() > num_before)
            leave(asyncio.create_task(_rest(work, thrown), name=task.get_name()))
            self._judge(None, num_before)
        finally:
            thrown = None
            for timer in (self._deadline, self._grace):
                if timer is not None:
                    timer.cancel()

    def _judge(self, problem: BaseException | None, num_before: int) -> None:
        """Raise what the end came of, if that is another thing than its own: others who cancel, or the deadline."""
        for _ in range(self._is_due + self._is_left):
            self._task.uncancel()
        if self._task.cancelling() > num_before:
            raise asyncio.CancelledError from problem
        if self._is_due:
            raise DeadlineError(f"it took longer than {self._limit_s:g} s") from problem
        if isinstance(problem, asyncio.CancelledError):
            raise RuntimeError("CancelledError: it was cancelled from within") from problem
        if isinstance(problem, SystemExit | GeneratorExit):  # it would end what must go on
            raise RuntimeError(f"{type(problem).__name__}: {problem}") from problem

    def _set_timers(self, *, is_cancelled: bool) -> None:
        if self._deadline is None:
            self._deadline = self._after(self._limit_s, self._on_deadline)
        if is_cancelled and self._grace is None:
            self._grace = self._after(self._grace_s, self._on_end_of_grace)
        elif not is_cancelled and self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def _after(self, seconds: float, what: Callable[[], None]) -> asyncio.TimerHandle:
        return self._task.get_loop().call_later(min(seconds, FOREVER_S), what)

    def _on_deadline(self) -> None:
        if self._clock is not None and (rest_s := self._limit_s - self._clock.seconds) > 0:
            self._deadline = self._after(rest_s, self._on_deadline)
            return
        self._is_due = True
        self._task.cancel()

    def _on_end_of_grace(self) -> None:
        self._is_left = True
        self._task.cancel()


async def _rest(work: Coroutine[Any, Any, Any], thrown: BaseException | None) -> None:
    """Go on with what would not be cancelled; what it comes to is nobody's any more."""
    with contextlib.suppress(BaseException):
        await _continued(work, thrown)


@coroutine
def _continued(work: Coroutine[Any, Any, Any], thrown: BaseException | None) -> Generator[Any, Any, None]:
    while True:
        try:
            waits_for = work.send(None) if thrown is None else work.throw(thrown)
        except StopIteration:
            return
        thrown = None
        try:
            yield waits_for
        except BaseException as raised:
            thrown = raised
