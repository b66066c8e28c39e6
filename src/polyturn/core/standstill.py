"""Standstill: ends the process where a plug-in holds the event loop for good, or a finalizer of one any thread.

    async def execute(…): time.sleep(10**9)       the loop stands, and with it every deadline
    def __del__(self): time.sleep(10**9)          wherever the object is dropped: in any thread, after the loop, too

Nothing in Python ends such code but the end of its process. What a run has recorded is whole at any moment, so it ends
as by a kill, with a sentence; a worker of a cluster, too. Where else the loop is not the main thread's (a notebook's), it is
only said.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence

from polyturn.core.code_origin import is_an_authors, is_ours, place_of
from polyturn.core.watchdog import calls_of_plugins, culprit_of

logger = logging.getLogger(__name__)

DEADLINE_S = 60.0
"""The longest deadline of a plug-in where nobody says another."""

GRACE_S = 240.0
"""Seconds for which a plug-in may stand still beyond its deadline: if it comes back, the run goes on."""

LAST_HELD_S = 60.0
"""The same for a finalizer once the event loop is over."""

_LOOK_S = 2.0
_SAY_S = 4.0
"""Seconds that the sentence may take: whoever stands still may hold the lock of the console."""

_GO_ON = "--resume goes on from the latest checkpoint of training"

_DEBUGGERS = ("/bdb.py", "/pydevd.py")
"""A person looks at what stands in one of these."""


class Standstill:
    """Looks every two seconds at what an event loop's thread does, and at the finalizers in all threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, deadline_s: float, of_worker: bool = False) -> None:
        """Watch from now until the calling thread has left the library.

        Args:
            loop: The event loop, which this thread is about to run.
            deadline_s: The longest deadline of its plug-ins.
            of_worker: The process is there for nothing but what this loop does, which somebody else runs and this thread
                is in: watch until the loop is closed.
        """
        self._loop = loop
        self._held_s = deadline_s + GRACE_S
        self._num_turns = 0
        """Number of times that the loop was seen to go on."""
        self._is_over = False
        self._since: dict[object, float] = {}
        """Call that stands still -> since when."""
        self._of_main = of_worker or threading.current_thread() is threading.main_thread()
        """Whether the process is the loop's to end."""
        self._of_worker = of_worker
        threading.Thread(target=self._watch, args=(threading.get_ident(),), name="polyturn-standstill", daemon=True).start()

    def end_loop(self) -> None:
        """Watch only finalizers from now on."""
        self._is_over = True
        self._held_s = min(self._held_s, LAST_HELD_S)

    def _turn(self) -> None:
        self._num_turns += 1

    def _watch(self, thread: int) -> None:
        """Run in a thread of its own."""
        is_there = True
        while is_there or (self._of_worker and not self._loop.is_closed()):
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._turn)
            time.sleep(min(_LOOK_S, self._held_s / 4))
            is_there = self._look(thread)

    def _look(self, thread: int) -> bool:
        """Note what stands still, end the process for what has for too long; return whether the thread is in the library."""
        stacks = _stacks()
        own = stacks.get(thread, [(_CUT, "")] if thread in sys._current_frames() else [])
        if any(file.endswith(_DEBUGGERS) for file, _ in own):
            self._since = {}
            return True
        found: dict[object, int] = {}
        for ident, stack in stacks.items():
            if (number := _finalizer(stack)) is not None:
                found[ident, number, self._num_turns if ident == thread else 0] = ident
        if not self._is_over and _is_in_a_plugin(own):
            found[self._num_turns] = thread
        now = time.monotonic()
        self._since = {call: self._since.get(call, now) for call in found}
        for call, began in self._since.items():
            if now - began >= self._held_s and (what := self._named(found[call], is_loop=found[call] == thread)):
                self._end(what, now - began)
        return any(is_ours(file) or file == _CUT for file, _ in own)

    def _named(self, ident: int, *, is_loop: bool) -> str:
        """Return what a thread that stands still is in; "" where it has gone on after all."""
        frame = sys._current_frames().get(ident)
        stack = [each for each, _ in traceback.walk_stack(frame)][::-1] if frame is not None else []
        if (number := _finalizer([(each.f_code.co_filename, each.f_code.co_name) for each in stack])) is not None:
            return f"a thread: {place_of(stack[number:])}"
        culprit = culprit_of(frame, self._loop) if is_loop and not self._is_over else None
        return "" if culprit is None else f"the event loop: {culprit.name} ({culprit.where})"

    def _end(self, what: str, seconds: float) -> None:
        told = (
            f"for {seconds:.3g} s a plug-in has held {what}; it neither returns nor awaits, so that no deadline can end it. "
        )
        if not self._of_main:
            logger.error("%sInterrupt twice to leave the run", told)
            self._held_s *= 2
            return
        told += "The process ends; what it recorded is whole, and "
        told += "another worker takes its episodes" if self._of_worker else _GO_ON
        threading.Thread(target=_end_anyway, args=(told,), name="polyturn-end", daemon=True).start()
        logger.error("%s", told)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # whoever read it is gone
                stream.flush()
        os._exit(2)


def _end_anyway(told: str) -> None:
    """Run in a thread: end the process although its sentence finds no way to the console."""
    time.sleep(_SAY_S)
    with contextlib.suppress(OSError):
        os.write(2, f"{told}\n".encode())
    os._exit(2)


def _stacks() -> dict[int, list[tuple[str, str]]]:
    """Return thread -> (file, function) of the calls that it is in, the outermost first: the innermost hundred of a hundred.

    They are written down all at once. To follow `f_back` through a thread that runs is to follow the frames of coroutines
    that are suspended meanwhile, which ends Python 3.11 itself.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        lines = file.read().decode(errors="replace").splitlines()
    stacks: dict[int, list[tuple[str, str]]] = {}
    stack: list[tuple[str, str]] = []
    for line in lines:
        if (head := _THREAD.match(line)) is not None:
            stack = stacks.setdefault(int(head[1], 16), [])
        elif (call := _CALL.match(line)) is not None:
            stack.insert(0, (call[1], call[2]))
        elif line == "  ...":
            stack.insert(0, (_CUT, ""))
    return stacks


_CUT = "..."
"""In place of what stands above."""
_THREAD = re.compile(r"(?:Thread|Current thread) 0x([0-9a-f]+) ")
_CALL = re.compile(r'  File "(.*)", line \S+ in (.*)')


def _finalizer(stack: Sequence[tuple[str, str]]) -> int | None:
    """Return where in a stack the first finalizer of an author's is that runs inside the library's code, if there is one."""
    ours = next((i for i, (file, _) in enumerate(stack) if is_ours(file)), len(stack))
    return next((i for i in range(ours, len(stack)) if stack[i][1] == "__del__" and is_an_authors(stack[i][0])), None)


def _is_in_a_plugin(stack: Sequence[tuple[str, str]]) -> bool:
    """Return whether the last that was called, of the library and of authors, is an author's, or calls plug-ins."""
    known = [each for each in stack if is_ours(each[0]) or is_an_authors(each[0])]
    return bool(known) and (not is_ours(known[-1][0]) or known[-1] in calls_of_plugins())
