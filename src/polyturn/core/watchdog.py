"""Watchdog: notices that the event loop stands still, and says whose code holds it, while it does.

    the event loop of this run has stood still for 1.2 s in Slow.execute (tools.py:41, now in time.sleep called at
    tools.py:43), episode g3/1: …

An async plug-in that computes or sleeps without awaiting stops every episode at once, and nothing on the loop can tell. A
timer on the loop sets a mark four times in each `limit_s`; a thread that finds the mark too old looks at the loop's stack.
Between blocks both cost a few microseconds a second.

Whose code it is: the functions that call plug-ins say so (`calls_plugins`), and the first frame after the last of them that
is not the library's is the plug-in's. Code that runs in a task of its own is somebody's if it is neither the library's nor
an installed package's. What the library does for a plug-in, and what it asks other packages for meanwhile, is the library's.
Whoever is named was found in the same call twice in a row; the time in which one of the threads waited for a processor
counts for nobody.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

from polyturn.core.code_origin import STDLIB, is_an_authors, is_ours, is_stdlib

logger = logging.getLogger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])

_CALLERS: set[CodeType] = set()
"""The code of the functions that call plug-ins; filled where they are defined."""


def calls_plugins(function: _Function) -> _Function:
    """Mark a function of the library that calls the code of a plug-in."""
    _CALLERS.add(function.__code__)
    return function


def calls_of_plugins() -> set[tuple[str, str]]:
    """Return the file and the name of each function that calls the code of plug-ins."""
    return {(code.co_filename, code.co_name) for code in _CALLERS}


class Culprit(NamedTuple):
    """The code that holds the event loop."""

    name: str
    """As it is called in its file: `Class.method`."""
    where: str
    """file:line of the method, and of where it is at the moment."""
    episode: str
    """The episode, or "" where its task does not say."""
    call: int
    """Which call of it."""


class _Block(NamedTuple):
    """A time that the loop stands still."""

    began: float
    seen: Counter[Culprit]
    """The code that was found to hold it, each time that the thread looked."""


class LoopWatchdog:
    """Watches the event loop for as long as somebody is `watching`."""

    def __init__(self, *, limit_s: float = 1.0) -> None:
        """Watch nothing yet.

        Args:
            limit_s: How long the loop may stand still before it is said.
        """
        self.limit_s = limit_s
        self._watchers = 0
        self._mark = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._block: _Block | None = None
        """The one that lasts, or that nobody has counted yet."""
        self._blocked: dict[str, list[float]] = {}
        """Episode -> seconds of each time that a plug-in of it held the loop."""
        self._said: set[str] = set()
        self.num_blocked: Counter[str] = Counter()
        """Plug-in -> how often it held the loop."""

    @contextmanager
    def watching(self, episode: str | None = None) -> Iterator[None]:
        """Watch the running event loop meanwhile, and name the running task by its `episode`, which blocks are told by."""
        loop = asyncio.get_running_loop()
        if episode is not None and (task := asyncio.current_task()) is not None:
            task.set_name(episode)
        self._watchers += 1
        if self._loop is not loop or self._timer is None:
            self._begin(loop)
        try:
            yield
        finally:
            self._watchers -= 1

    def take(self, episode: str) -> tuple[int, float]:
        """Return how often, and for how many seconds, plug-ins of the episode held the loop; once."""
        if self._block is None and not self._blocked:
            return 0, 0.0
        with self._lock:
            if self._block is not None:  # called on the loop, so it is over
                self._mark = time.monotonic()
                self._count()
            found = self._blocked.pop(episode, [])
        return len(found), sum(found)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._end.set()
        self._end, self._loop = threading.Event(), loop
        self._set_mark()
        threading.Thread(
            target=self._watch,
            args=(loop, threading.get_ident(), threading.get_native_id(), self._end),
            name="polyturn-watchdog",
            daemon=True,
        ).start()

    def _set_mark(self) -> None:
        """Run on the loop: as long as this is called in time, nothing blocks."""
        assert self._loop is not None
        self._mark = time.monotonic()
        if self._watchers == 0:
            self._timer, self._loop = None, None
            self._end.set()
            return
        self._timer = self._loop.call_later(self.limit_s / 4, self._set_mark)

    def _watch(self, loop: asyncio.AbstractEventLoop, thread: int, native: int, end: threading.Event) -> None:
        """Run in a thread: look at the loop's stack while its mark is too old."""
        looked, lost_s, last_mark, last_culprit = time.monotonic(), 0.0, self._mark, None
        waited_s = seconds_without_processor(native)
        while not end.wait(self.limit_s / 4) and not loop.is_closed():
            mark, now = self._mark, time.monotonic()
            if mark != last_mark:
                lost_s, last_mark = 0.0, mark
            waits_s = seconds_without_processor(native)
            lost_s += max(0.0, now - looked - self.limit_s / 2, waits_s - waited_s)
            looked, waited_s = now, waits_s
            if now - mark - lost_s <= self.limit_s:
                with self._lock:
                    self._count()
                last_culprit = None
                continue
            former, culprit = last_culprit, culprit_of(sys._current_frames().get(thread), loop)
            last_culprit = culprit
            with self._lock:
                if culprit is None or former is None or former.call != culprit.call or self._mark != mark:
                    continue
                if self._block is None:
                    self._block = _Block(mark, Counter())
                self._block.seen[culprit] += 1
            self._say(culprit, time.monotonic() - mark)
        with self._lock:
            self._count()

    def _say(self, culprit: Culprit, seconds: float) -> None:
        if culprit.name in self._said:
            return
        self._said.add(culprit.name)
        logger.warning(
            "the event loop of this run has stood still for %.1f s in %s (%s), episode %s: it is async and does not await, "
            "so no other episode can go on; write it as a plain function, which runs in a thread, or await what takes long",
            seconds,
            culprit.name,
            culprit.where,
            culprit.episode or "unknown",
        )

    def _count(self) -> None:
        """Count the block that is over, if there is one."""
        block, self._block = self._block, None
        if block is None:
            return
        ((culprit, _),) = block.seen.most_common(1)
        self.num_blocked[culprit.name] += 1
        if culprit.episode:
            self._blocked.setdefault(culprit.episode, []).append(self._mark - block.began)


def culprit_of(frame: FrameType | None, loop: asyncio.AbstractEventLoop) -> Culprit | None:
    """Return whose code a loop's thread runs; None if it is not a plug-in's.

    Args:
        frame: What its thread is doing, the innermost frame.
        loop: The loop.
    """
    stack: list[FrameType] = []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    stack.reverse()
    caller = max((i for i, f in enumerate(stack) if f.f_code in _CALLERS), default=None)
    below = max((i for i, f in enumerate(stack) if _is_loop(f)), default=len(stack)) if caller is None else caller
    inner = [f for f in stack[below + 1 :] if not is_stdlib(f.f_code.co_filename)]
    authors = [i for i, f in enumerate(inner) if is_an_authors(f.f_code.co_filename)]
    ours = [i for i, f in enumerate(inner) if is_ours(f.f_code.co_filename)]
    if ours and ours[-1] > max(authors, default=-1):
        return None  # whoever is above only waits for what the library does, itself or by other packages
    if caller is None or ours[:1] == [0]:
        inner = inner[authors[0] :] if authors else []
    if not inner:
        return None
    first, at = inner[0].f_code, inner[-1]
    where = f"{first.co_filename}:{first.co_firstlineno}, now at {at.f_code.co_filename}:{at.f_lineno}"
    return Culprit(first.co_qualname, where, _episode(loop), id(inner[0]))


def seconds_without_processor(native_id: int) -> float:
    """Return how long a thread of this process has been ready to run and was not run; 0 where the system does not say."""
    try:
        with open(f"/proc/self/task/{native_id}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _is_loop(frame: FrameType) -> bool:
    """Return whether a frame is the event loop's own, with the frames of what it runs behind it."""
    code = frame.f_code
    return code.co_name in ("_run", "run", "run_forever") and code.co_filename.startswith(f"{STDLIB}asyncio/")


def _episode(loop: asyncio.AbstractEventLoop) -> str:
    """Return the episode whose task runs: tasks that run plug-ins have its name."""
    task = asyncio.current_task(loop)
    name = "" if task is None else task.get_name()
    return "" if name.startswith("Task-") else name.partition("#")[0]
