"""Daemon threads for plug-ins that are plain functions, so that a slow one never blocks the event loop.

An executor of the standard library cannot *abandon* a call that is past its deadline. The call's thread cannot be stopped.
So here the thread no longer counts against the maximum, the call is counted as abandoned, and the thread does not keep the
process alive. Threads start when there is work and end after some idle seconds.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from polyturn.core.errors import one_line


@dataclass(slots=True, eq=False)
class _Job:
    work: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)
    is_running: bool = False
    is_abandoned: bool = False
    is_owed: bool = False
    on_late: Callable[[Any], None] | None = None


class DaemonThreads:
    """Runs plain functions in at most `max_threads` daemon threads."""

    def __init__(self, *, name: str, max_threads: int = 64, idle_s: float = 10.0) -> None:
        self._name = name
        self._max_threads = max_threads
        self._idle_s = idle_s
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._num_threads = 0
        self._num_waiting = 0
        self._num_abandoned = 0
        self._is_closed = False

    @property
    def num_abandoned(self) -> int:
        """Number of late calls that still run after their caller stopped waiting."""
        return self._num_abandoned

    async def run(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        on_late: Callable[[Any], None] | None = None,
        is_owed: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Call `function` in a thread and return its result.

        Cancelling the caller returns at once. A call that has not begun is then dropped; a call that runs is abandoned.

        Args:
            function: The plain function; it sees the caller's context variables.
            args: Its positional arguments.
            on_late: Called in the thread with the result of an abandoned call that ends after all.
            is_owed: Whether to run a call that has not begun even if the caller is cancelled, such as a call that releases a
                resource.
            kwargs: Its keyword arguments.
        """
        job = _Job(partial(contextvars.copy_context().run, function, *args, **kwargs), on_late=on_late, is_owed=is_owed)
        self._submit(job)
        answer = asyncio.wrap_future(job.future)
        try:
            # Without the shield, the caller's cancellation would cancel the job itself.
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            answer.add_done_callback(_retrieve)
            self._abandon(job)
            raise

    def close(self) -> None:
        """Let idle threads end at once, and the others after their call; later calls still run."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _submit(self, job: _Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._grow()
            self._changed.notify()

    def _grow(self) -> None:
        """Start a thread if jobs need one. If the system refuses it, the jobs wait for running threads; without any, they
        fail."""
        if len(self._jobs) <= self._num_waiting or self._num_threads >= self._max_threads:
            return
        try:
            threading.Thread(target=self._work, name=f"polyturn-{self._name}", daemon=True).start()
        except RuntimeError as problem:
            if self._num_threads == 0:
                for job in self._jobs:
                    if job.future.set_running_or_notify_cancel():
                        job.future.set_exception(problem)
                self._jobs.clear()
            return
        self._num_threads += 1

    def _abandon(self, job: _Job) -> None:
        with self._changed:
            if job.is_running:
                job.is_abandoned = True
                self._num_abandoned += 1
                self._num_threads -= 1
                self._grow()
                return
            if job.is_owed and not job.future.done():
                return
            job.future.cancel()
        if not job.future.cancelled() and job.future.exception() is None and job.on_late is not None:
            job.on_late(job.future.result())  # it ended just as the caller was cancelled

    def _work(self) -> None:
        while (job := self._next()) is not None:
            result, error = None, None
            try:
                result = job.work()
            except BaseException as raised:
                # Only a plain exception can cross a future: others would be lost, or end the event loop or this thread.
                odd = not isinstance(raised, Exception) or isinstance(raised, StopIteration)
                error = RuntimeError(one_line(raised)) if odd else raised
            with self._changed:
                job.is_running = False
                if job.is_abandoned:
                    self._num_abandoned -= 1
                elif error is not None:
                    job.future.set_exception(error)
                else:
                    job.future.set_result(result)
            if job.is_abandoned:
                if error is None and job.on_late is not None:
                    job.on_late(result)
                return  # another thread has taken this one's place
            del job, result, error  # an idle thread must not keep an episode's objects alive

    def _next(self) -> _Job | None:
        with self._changed:
            while True:
                while self._jobs:
                    job = self._jobs.popleft()
                    if job.future.set_running_or_notify_cancel():
                        job.is_running = True
                        return job
                self._num_waiting += 1
                was_notified = not self._is_closed and self._changed.wait(self._idle_s)
                self._num_waiting -= 1
                if (not was_notified or self._is_closed) and not self._jobs:
                    self._num_threads -= 1
                    return None


def _retrieve(answer: asyncio.Future[Any]) -> None:
    """Retrieve the result of an abandoned call, so that asyncio does not report it."""
    _ = answer.cancelled() or answer.exception()
