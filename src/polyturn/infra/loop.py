"""Runs the event loop so that it ends even if plug-ins leave tasks behind, and logs code that blocks it.

    run_loop(work)    work ends -> remaining tasks are cancelled -> GRACE_S -> the result; tasks that still run are logged
    LoopMonitor       the event loop of this run has been blocked for 1.2 s in Slow.execute (tools.py:41, now at tools.py:43)

`run_loop` replaces `asyncio.run`, which waits without a limit for tasks that ignore their cancellation, for asynchronous
generators and for the threads of the default executor. An async plug-in that computes or sleeps without awaiting stops
every episode and every deadline. If the loop's heartbeat is late, a thread logs the code that blocks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from polyturn.core.code_origin import OURS, STDLIB, describe_position, is_an_authors, is_ours, is_stdlib, passed_an_author
from polyturn.core.errors import RolloutError, one_line, raised_at

logger = logging.getLogger(__name__)

T = TypeVar("T")

GRACE_S = 1.5
"""Seconds that tasks may take to end once they are cancelled, and asynchronous generators to close."""

END_S = 4.5
"""Seconds to wait for the tasks to end. After that the event loop is taken to be blocked, and is abandoned."""

HELD_S = 240.0
"""Seconds for which a plug-in may block the loop beyond its deadline before the process ends."""

_MEDDLED = (
    "a plug-in (a tool, a reward, an interaction, a scheduler) {}, which runs all episodes; let it end only its own tasks"
)

_ABANDONED: list[object] = []
"""Tasks that ignored their cancellation, and event loops that stayed blocked. They are kept, because their
destructors would run the plug-in's code again."""


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in a new event loop and return its result; cancel, then abandon, the tasks that it leaves behind.

    SIGINT cancels `work`; a second SIGINT raises KeyboardInterrupt at once.

    Raises:
        RolloutError: a plug-in in `work` cancelled all of `work`, stopped the event loop, or raised SystemExit in it.
    """
    runner = asyncio.Runner()
    loop = runner.get_loop()
    loop.set_exception_handler(_report)
    level = logging.WARNING
    try:
        return runner.run(work)
    except KeyboardInterrupt:
        level = logging.DEBUG  # the user does not wait for tasks to end
        raise
    except asyncio.CancelledError as problem:  # not from SIGINT, which raises KeyboardInterrupt
        raise RolloutError(_MEDDLED.format("cancelled every task of the event loop")) from problem
    except RuntimeError as problem:
        if str(problem) != "Event loop stopped before Future completed.":
            raise
        raise RolloutError(_MEDDLED.format("stopped the event loop")) from problem
    except SystemExit as problem:  # from a task or a callback that a plug-in started
        if not passed_an_author(problem):
            raise
        raise RolloutError(_MEDDLED.format(f"raised {one_line(problem)}{raised_at(problem)} in the event loop")) from problem
    finally:
        # In a thread: a plug-in that blocks when it is cancelled blocks the loop as well.
        ended = threading.Event()
        ending = threading.Thread(target=_end, args=(loop, ended, level), name="polyturn-end-tasks", daemon=True)
        ending.start()
        try:
            ending.join(END_S)
        except KeyboardInterrupt:
            logger.warning("interrupted while tasks were being cancelled; they are abandoned")
        asyncio.set_event_loop(None)
        if ended.is_set():
            loop.close()  # also shuts down the default executor, without waiting for its threads
        else:
            _ABANDONED.append(loop)
            location = describe_position(_stack(ending.ident))
            logger.log(level, "a plug-in does not end with the run, and is abandoned: %s", location)


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error that no task awaits, except for the interrupt, which `run_loop` raises."""
    if not isinstance(context.get("exception"), KeyboardInterrupt):
        loop.default_exception_handler(context)


def _end(loop: asyncio.AbstractEventLoop, ended: threading.Event, level: int) -> None:
    """End the tasks of a loop, in a thread. Errors that plug-ins raise now are only logged."""
    ending = loop.create_task(_end_tasks(loop, level), name="the end of the run")
    try:
        while not ending.done():
            # A task may raise the interrupt that ended the run again; `run_loop` raises it.
            with contextlib.suppress(KeyboardInterrupt):
                loop.run_until_complete(ending)
    except BaseException as problem:
        logger.log(level, "a task that was cancelled at the end of the run raised %r; the others are abandoned", problem)
    ended.set()


async def _end_tasks(loop: asyncio.AbstractEventLoop, level: int) -> None:
    """Cancel every other task and close the asynchronous generators; log and keep the tasks that continue."""
    me = asyncio.current_task()
    rest = asyncio.all_tasks() - {me}
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest, timeout=GRACE_S)
    await asyncio.wait({loop.create_task(loop.shutdown_asyncgens(), name="an async generator")}, timeout=GRACE_S)
    for task in rest:
        if task.done() and not task.cancelled() and (problem := task.exception()) is not None:
            logger.log(level, "a task that was cancelled at the end of the run raised %r", problem)
    left = [task for task in asyncio.all_tasks() - {me} if not task.done()]
    for task in left:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    _ABANDONED.extend(left)
    for name in sorted({describe_position(_awaited(task)) or task.get_name() for task in left}):
        logger.log(level, "a task ignores being cancelled at the end of the run, and is abandoned: %s", name)


def _awaited(task: asyncio.Task[Any]) -> list[FrameType]:
    """Return the frames of a suspended task's coroutines, outermost first."""
    frames: list[FrameType] = []
    coroutine: Any = task.get_coro()
    while inspect.iscoroutine(coroutine) and coroutine.cr_frame is not None:
        frames.append(coroutine.cr_frame)
        coroutine = coroutine.cr_await
    return frames


def _stack(thread: int | None) -> list[FrameType]:
    """Return the frames of a thread, outermost first; empty if the thread has ended."""
    frame = None if thread is None else sys._current_frames().get(thread)
    return [each for each, _ in traceback.walk_stack(frame)][::-1] if frame is not None else []


class LoopMonitor:
    """Names an author's code that blocks an event loop, and ends the process if the code never returns."""

    def __init__(
        self, *, limit_s: float | None = 1.0, deadline_s: float | None = None, owns_process: bool | None = None
    ) -> None:
        """Configure the monitor; `watching` starts it.

        Args:
            limit_s: Seconds that the loop may be blocked before the code is logged; None logs nothing.
            deadline_s: The longest deadline of a plug-in; `HELD_S` seconds later the process ends. None never ends it.
            owns_process: Whether the monitor may end the process; by default, if the loop runs in the main thread.
        """
        self._limit_s = limit_s or float("inf")
        self._end_s = float("inf") if deadline_s is None else deadline_s + HELD_S
        self._period_s = min(self._limit_s, self._end_s, 8.0) / 4
        self._owns_process = owns_process
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_watching = 0
        self._beat_at = 0.0
        self._blocked_at: float | None = None
        """Time of the heartbeat after which the loop was blocked; None if it is not blocked."""
        self._logged: set[str] = set()
        self._blocks: list[float] = []
        """Durations, in seconds, of the blocks since the last `take`."""

    @contextmanager
    def watching(self, name: str | None = None) -> Iterator[None]:
        """Watch the running event loop inside the block, and give the running task a `name`; blocks may overlap."""
        loop = asyncio.get_running_loop()
        if name is not None and (task := asyncio.current_task()) is not None:
            task.set_name(name)
        self._num_watching += 1
        if self._loop is not loop:
            self._loop = loop
            ended, ident = threading.Event(), threading.get_ident()
            owns_process = threading.current_thread() is threading.main_thread()
            args = (loop, ident, ended, owns_process if self._owns_process is None else self._owns_process)
            self._beat(loop, ended)
            threading.Thread(target=self._watch, args=args, name="polyturn-loop-monitor", daemon=True).start()
        try:
            yield
        finally:
            self._num_watching -= 1

    def take(self) -> tuple[int, float]:
        """Return (number of times, seconds) that plug-ins blocked the loop since the last call."""
        self._count()
        blocks, self._blocks = self._blocks, []
        return len(blocks), sum(blocks)

    def _beat(self, loop: asyncio.AbstractEventLoop, ended: threading.Event) -> None:
        self._count()
        if self._num_watching and self._loop is loop:
            loop.call_later(self._period_s, self._beat, loop, ended)
            return
        self._loop = None if self._loop is loop else self._loop
        ended.set()

    def _count(self) -> None:
        """Count the block that has just ended, if any. This runs on the loop, so the loop is no longer blocked."""
        now = time.monotonic()
        if self._blocked_at == self._beat_at:
            self._blocks.append(now - self._beat_at)
        self._beat_at = now

    def _watch(self, loop: asyncio.AbstractEventLoop, thread: int, ended: threading.Event, owns_process: bool) -> None:
        """Read the loop's stack, in a thread, while the heartbeat is late."""
        held_at: float | None = None
        while not ended.wait(self._period_s) and not loop.is_closed():
            beat_at, now = self._beat_at, time.monotonic()
            if now - beat_at <= min(self._limit_s, self._end_s):
                continue
            frame = _blocking(_stack(thread))
            if not frame or beat_at != self._beat_at:
                continue
            if now - beat_at > self._limit_s:
                self._blocked_at = beat_at
                self._log(frame, now - beat_at, asyncio.current_task(loop))
            if now - beat_at > self._end_s and held_at != beat_at:
                held_at = beat_at
                _end_process(frame, now - beat_at, owns_process=owns_process)

    def _log(self, where: str, seconds: float, task: asyncio.Task[Any] | None) -> None:
        location = where.partition(", now at ")[0]
        if location in self._logged:
            return
        self._logged.add(location)
        logger.warning(
            "the event loop of this run has been blocked for %.1f s in %s, episode %s: the function is async, so no other "
            "episode continues between two of its awaits; await the slow part, move it out of the function (create a client "
            "once, for instance), or write a plain function, which runs in a thread",
            seconds,
            where,
            "unknown" if task is None else task.get_name().partition("#")[0],
        )


_GUARD = f"{OURS}infra/deadline.py"
"""The file that calls the code of authors."""


def _blocking(stack: list[FrameType]) -> str:
    """Describe the author's code that blocks a loop; "" while the library works, by itself or for an author."""
    handle = f"{STDLIB}asyncio/events.py", "_run"
    codes = [(frame.f_code.co_filename, frame.f_code.co_name) for frame in stack]
    inner = stack[codes.index(handle) + 1 :] if handle in codes else stack
    files = [frame.f_code.co_filename for frame in inner]
    if _GUARD in files:  # the code that it calls is an author's, even if that is installed as a package
        behind = len(files) - files[::-1].index(_GUARD)
        begins = next((i for i in range(behind, len(files)) if not is_ours(files[i]) and not is_stdlib(files[i])), None)
        if begins is not None and not any(map(is_ours, files[begins:])):
            return describe_position(inner[begins:])
    known = [i for i, file in enumerate(files) if is_ours(file) or is_an_authors(file)]
    is_debugged = any(file.endswith(("/bdb.py", "/pydevd.py")) for file in files)
    if not known or is_ours(files[known[-1]]) or is_debugged:
        return ""
    return describe_position(inner[next(i for i in known if not is_ours(files[i])) :])


def _end_process(location: str, seconds: float, *, owns_process: bool) -> None:
    """Write the location and all stacks and end the process; without `owns_process`, only log an error."""
    sentence = f"for {seconds:.3g} s a plug-in has held the event loop: {location}; it neither returns nor awaits, so no "
    sentence += "deadline can end it."
    if not owns_process:
        logger.error("%s Interrupt twice to end the run", sentence)
        return
    sentence += " The process ends; its records are complete, and --resume continues from the latest checkpoint"
    os.write(2, f"{sentence}\n".encode())  # the code may hold the lock of the log or of a stream
    faulthandler.dump_traceback(2)
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(GRACE_S)
    os._exit(2)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
