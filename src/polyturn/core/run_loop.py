"""Run a program's coroutine to its end, whatever the plug-ins that it called left running.

    run_loop(work)    work ends ──▶ the tasks and generators that are left are cancelled ──▶ GRACE_S ──▶ its result
                                                                                     └──▶ what is left is named
                      a plug-in holds the event loop, or a finalizer its thread, for minutes ──▶ the process ends

In place of `asyncio.run`, which after the coroutine's end waits without a limit for tasks that ignore their cancellation,
for asynchronous generators, and for the threads of the default executor. Code that never gives its thread back cannot be
cancelled at all, and no deadline on the loop passes while the loop stands.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import traceback
from collections.abc import Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

from polyturn.core.code_origin import place_of
from polyturn.core.errors import RolloutError, one_line, raised_at
from polyturn.core.interrupts import ends_for_a_plugin
from polyturn.core.standstill import DEADLINE_S, Standstill

logger = logging.getLogger(__name__)

T = TypeVar("T")

GRACE_S = 1.5
"""Seconds that tasks may take to end once they are cancelled, and asynchronous generators to close."""

END_S = 4.5
"""Seconds that both may take together, where the event loop itself stands still."""

_MEDDLED = (
    "a plug-in (a tool, a reward, an interaction, a scheduler) {}, in which everything runs; let it end its own tasks only"
)

_ABANDONED: list[object] = []
"""Tasks that ignored their end, kept because the collection of a pending coroutine runs the code of a plug-in once more."""


def run_loop(work: Coroutine[Any, Any, T], *, deadline_s: float = DEADLINE_S) -> T:
    """Return what `work` returns, run in an event loop of its own; what it leaves running is cancelled, then abandoned.

    SIGINT cancels `work`, and a second one raises KeyboardInterrupt at once.

    Args:
        work: The coroutine.
        deadline_s: The longest deadline of its plug-ins. The process ends minutes after it where one still holds the loop,
            because nothing else can end that.

    Raises:
        RolloutError: code that it called cancelled the whole of it, or stopped or left the event loop.
    """
    runner = asyncio.Runner()
    loop = runner.get_loop()
    standstill = Standstill(loop, deadline_s=deadline_s)
    try:
        return runner.run(work)
    except asyncio.CancelledError as problem:  # nobody here cancels it: a signal comes as another exception
        raise RolloutError(_MEDDLED.format("cancelled every task of the event loop")) from problem
    except RuntimeError as problem:
        if str(problem) != "Event loop stopped before Future completed.":
            raise
        raise RolloutError(_MEDDLED.format("stopped the event loop")) from problem
    except (SystemExit, KeyboardInterrupt) as problem:  # of a task or a callback that it started by itself
        if not ends_for_a_plugin(problem):
            raise
        raise RolloutError(_MEDDLED.format(f"raised {one_line(problem)}{raised_at(problem)} in the event loop")) from problem
    finally:
        standstill.end_loop()
        # In a thread: what a plug-in does when it is cancelled may stand still, and the loop with it.
        ended = threading.Event()
        ending = threading.Thread(target=_end, args=(loop, ended), name="polyturn-end-tasks", daemon=True)
        ending.start()
        try:
            ending.join(END_S)
        except KeyboardInterrupt:
            logger.warning("interrupted while tasks were being cancelled; they are abandoned")
        asyncio.set_event_loop(None)
        if ended.is_set():
            loop.close()  # ends the default executor, too, and does not wait for its threads
        else:
            _ABANDONED.append(loop)
        frames = [frame for frame, _ in traceback.walk_stack(sys._current_frames().get(ending.ident or 0))]
        place = place_of(frames[::-1]) if ending.is_alive() else ""
        if place or not ended.is_set():
            logger.warning("abandoned at the end of the run, because it stands still: %s", place)


def _end(loop: asyncio.AbstractEventLoop, ended: threading.Event) -> None:
    """Run in a thread: end the tasks of a loop. What a plug-in raises there is no error of the run."""
    try:
        loop.run_until_complete(_end_tasks(loop))
    except BaseException as problem:
        logger.warning("a task that was cancelled at the end of the run raised %r; the others are abandoned", problem)
    ended.set()
    gc.collect()  # here, where finalizers of plug-ins may stand still


async def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel every other task and close the asynchronous generators; name what goes on, and keep it."""
    me = asyncio.current_task()
    rest = asyncio.all_tasks() - {me}
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest, timeout=GRACE_S)
    generators = list(loop._asyncgens)  # type: ignore[attr-defined]
    await asyncio.wait({loop.create_task(loop.shutdown_asyncgens())}, timeout=GRACE_S)
    for task in rest:
        if task.done() and not task.cancelled() and (problem := task.exception()) is not None:
            logger.warning("a task that was cancelled at the end of the run raised %r", problem)
    left = [task for task in asyncio.all_tasks() - {me} if not task.done()]
    for task in left:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    _ABANDONED.extend(left)
    # A generator is closed in a task that has no frame of its own.
    found = {place_of(_frames(each)) for each in (*left, *(g for g in generators if g.ag_running))} - {""}
    for place in sorted(found) or [task.get_name() for task in left]:
        logger.warning("abandoned at the end of the run, because it ignores being cancelled: %s", place)


def _frames(waiting: Any) -> list[FrameType]:
    """Return the frames of a suspended task or generator, the outermost first."""
    return list(_frames_of(waiting.get_coro() if isinstance(waiting, asyncio.Task) else waiting))


def _frames_of(waiting: Any) -> Iterator[FrameType]:
    while waiting is not None:
        kind = next((k for k in ("cr", "gi", "ag") if hasattr(waiting, f"{k}_frame")), None)
        if kind is None:
            return
        if (frame := getattr(waiting, f"{kind}_frame")) is not None:
            yield frame
        waiting = getattr(waiting, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
