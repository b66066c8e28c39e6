"""Standstill: ends the process where a plug-in holds the event loop for good, or a finalizer of one any thread.

    async def execute(…): time.sleep(10**9)       the loop stands, and with it every deadline
    def __del__(self): time.sleep(10**9)          wherever the object is dropped: in any thread, after the loop, too

Nothing in Python ends such code but the end of its process. What a run has recorded is whole at any moment, so it ends as by
a kill, with a sentence. Where the loop is not the main thread's (a notebook's), it is only said.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from types import FrameType

from polyturn.core.code_origin import is_ours, place_of
from polyturn.core.watchdog import culprit_of

logger = logging.getLogger(__name__)

DEADLINE_S = 60.0
"""The longest deadline of a plug-in where nobody says another."""

GRACE_S = 240.0
"""How long the code of a plug-in may stand still beyond its deadline: what comes back was rude, and is no reason to end."""

LAST_HELD_S = 60.0
"""The same for a finalizer once the event loop is over."""

_LOOK_S = 2.0
_SAY_S = 4.0
"""How long the sentence may take: whoever stands still may hold the lock of the console."""

_DEBUGGERS = ("/bdb.py", "/pydevd.py")
"""A person looks at what stands in one of these."""


class Standstill:
    """Looks every two seconds at what an event loop's thread does, and at the finalizers in all threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, deadline_s: float) -> None:
        """Watch from now until the calling thread has left the library.

        Args:
            loop: The event loop, which this thread is about to run.
            deadline_s: The longest deadline of its plug-ins.
        """
        self._loop = loop
        self._held_s = deadline_s + GRACE_S
        self._num_turns = 0
        """How often the loop was seen to go on."""
        self._is_over = False
        self._since: dict[object, float] = {}
        """Call that stands still -> since when."""
        self._of_main = threading.current_thread() is threading.main_thread()
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
        while is_there:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._turn)
            time.sleep(min(_LOOK_S, self._held_s / 4))
            is_there = self._look(thread)

    def _look(self, thread: int) -> bool:
        """Note what stands still, end the process for what has for too long; return whether the thread is in the library.

        The frames go with this call: to hold one is to keep what its function held.
        """
        frames = sys._current_frames()
        stacks = {ident: [each for each, _ in traceback.walk_stack(frame)][::-1] for ident, frame in frames.items()}
        own = stacks.get(thread, [])
        if any(each.f_code.co_filename.endswith(_DEBUGGERS) for each in own):
            self._since = {}
            return True
        found: dict[object, str] = {}
        for ident, stack in stacks.items():
            if (inner := _finalizer(stack)) is not None:
                turn = self._num_turns if ident == thread else 0
                found[turn, ident, id(inner[0]), inner[0].f_lasti] = f"a thread: {place_of(inner)}"
        if own and not self._is_over and (culprit := culprit_of(own[-1], self._loop)) is not None:
            found[self._num_turns] = f"the event loop: {culprit.name} ({culprit.where})"
        now = time.monotonic()
        self._since = {call: self._since.get(call, now) for call in found}
        for call, began in self._since.items():
            if now - began >= self._held_s:
                self._end(found[call], now - began)
        return any(is_ours(each.f_code.co_filename) for each in own)

    def _end(self, what: str, seconds: float) -> None:
        told = (
            f"for {seconds:.3g} s a plug-in has held {what}; it neither returns nor awaits, so that no deadline can end it. "
        )
        if not self._of_main:
            logger.error("%sInterrupt twice to leave the run", told)
            self._held_s *= 2
            return
        told += "The process ends; what it recorded is whole, and --resume goes on from the latest checkpoint of training"
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


def _finalizer(stack: list[FrameType]) -> list[FrameType] | None:
    """Return the frames from the first finalizer of an author's on that runs inside the library's code, if there is one."""
    ours = next((i for i, each in enumerate(stack) if is_ours(each.f_code.co_filename)), len(stack))
    for number in range(ours, len(stack)):
        if stack[number].f_code.co_name == "__del__" and place_of([stack[number]]):
            return stack[number:]
    return None
