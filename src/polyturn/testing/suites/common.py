"""Shared by the suites: one error for all problems, and checks for state that is not freed and calls that block.

    async with Findings("interaction Tutor") as findings:
        findings.expect(is_text, "start_interaction returned 3; return the id as text")
    ->  ContractError: interaction Tutor breaks its contract:
          1. start_interaction returned 3; return the id as text

A suite continues after a problem, so that the author sees all problems at once.
"""

from __future__ import annotations

import asyncio
import math
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import FrameType, TracebackType
from typing import Any

from polyturn.core.code_origin import describe_position, is_ours
from polyturn.core.errors import one_line

LONGEST_BLOCK_S = 0.25
"""Seconds for which an async method may block the event loop."""
NUM_BLOCKS = 3
"""Number of blocking calls that count as a problem; fewer may be one-time work, such as an import or a compilation."""
NUM_EPISODES = 30
"""Number of episodes to play to find state that is not freed."""
DEADLINE_S = 60.0
"""Seconds that a call of a plug-in may take in a test."""
INTERRUPT_S = DEADLINE_S
"""Seconds after which code that blocks the event loop is interrupted, so that the test ends."""
_INTERRUPT = signal.SIGVTALRM


class ContractError(AssertionError):
    """A plug-in breaks its contract with the framework; the message lists the problems."""


class Findings:
    """A context that collects problems and raises them as one error at its end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.problems: list[str] = []
        self._blocks: list[tuple[str, float]] = []
        self._pulse = Pulse()
        """The measurement of the current call."""

    async def __aenter__(self) -> Findings:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Stop):
            return  # another exception is more informative than the list
        if len(self._blocks) >= NUM_BLOCKS:
            what, seconds = self._blocks[0]
            self.expect(
                False,
                f"{what} blocked the event loop, and so all other episodes, for {seconds:.1f} s; await slow operations, "
                "or run them in a thread",
            )
        if self.problems:
            listed = "".join(f"\n  {number}. {problem}" for number, problem in enumerate(self.problems, start=1))
            raise ContractError(f"{self.name} breaks its contract:{listed}") from None

    def expect(self, is_kept: bool, problem: str) -> bool:
        """Record `problem` unless `is_kept`; return `is_kept`."""
        if self._pulse.interrupted:  # problems that follow from the interrupt do not count
            self.stop()
        if not is_kept and problem not in self.problems:
            self.problems.append(problem)
        return is_kept

    @asynccontextmanager
    async def calling(self, what: str, *, advice: str = "") -> AsyncIterator[None]:
        """Record a problem if the code inside raises, times out, or blocks the event loop; the suite then continues."""
        pulse = self._pulse = Pulse(interrupt_s=INTERRUPT_S)
        problem = ""
        try:
            async with asyncio.timeout(DEADLINE_S), pulse:
                yield
        except TimeoutError:
            problem = f"{what} took longer than {DEADLINE_S:g} s"
        except Stop:
            if not pulse.interrupted:
                raise
        except Exception as error:
            problem = f"{what} raised {one_line(error)}{'; ' + advice if advice else ''}"
        except Interrupted:
            pass
        self._pulse = Pulse()
        if pulse.interrupted:
            self.expect(
                False,
                f"{what} blocked the event loop for {INTERRUPT_S:g} s, in {pulse.interrupted}, and was interrupted; await "
                "slow operations, or run them in a thread",
            )
            self.stop()
        self.expect(not problem, problem)
        if pulse.longest_s > LONGEST_BLOCK_S:
            self._blocks.append((what, pulse.longest_s))
            if len(self._blocks) >= NUM_BLOCKS:  # enough to report; with a slow plug-in the rest would take minutes
                self.stop()

    def stop(self) -> None:
        """End the suite, because later checks are meaningless."""
        raise Stop


class Stop(Exception):
    """Ends a suite early."""


class Interrupted(BaseException):
    """Raised in a plug-in's code that blocks the event loop; a BaseException, because plug-ins hardly ever catch one."""


class Pulse:
    """Measures for how long the event loop did not run a task that is always ready, and interrupts code that blocks it.

    It uses clocks that stop when a busy machine does not schedule this process: the CPU time of the loop's thread, and the
    number of wake-ups of a sleeping thread.
    """

    INTERVAL_S = 0.01

    def __init__(self, *, interrupt_s: float = math.inf) -> None:
        """Set the time after which code that blocks a loop of the main thread is interrupted, in seconds."""
        self.longest_s = 0.0
        self.num_wakes = 0
        """Number of wake-ups of the thread so far."""
        self.interrupted = ""
        """The position of the interrupted code; "" if none was interrupted."""
        self._interrupt_s = interrupt_s
        self._last = (0, 0.0)
        self._end = threading.Event()
        self._lock = threading.Lock()
        """Held while the thread interrupts, and while it is ended."""

    async def __aenter__(self) -> Pulse:
        self._last = self._now()
        if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
            self._interrupt_s = math.inf
        if self._interrupt_s < math.inf:
            self._former = signal.signal(_INTERRUPT, self._interrupt)
        threading.Thread(target=self._wake, name="polyturn-pulse", daemon=True).start()
        self._task = asyncio.create_task(self._beat())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._count()
        with self._lock:
            self._end.set()
        if self._interrupt_s < math.inf:
            signal.signal(_INTERRUPT, self._former)
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _beat(self) -> None:
        while True:
            self._count()
            await asyncio.sleep(self.INTERVAL_S)

    def _wake(self) -> None:
        while not self._end.wait(self.INTERVAL_S):
            self.num_wakes += 1
            with self._lock:
                if (self.num_wakes - self._last[0]) * self.INTERVAL_S > self._interrupt_s and not self._end.is_set():
                    signal.pthread_kill(threading.main_thread().ident or 0, _INTERRUPT)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Raise in the plug-in's code that blocks the loop, unless the library itself works."""
        self._count()  # the next interrupt is due after the same time
        frames = [each for each, _ in traceback.walk_stack(frame)][::-1] if frame is not None else []
        first = max((i for i, each in enumerate(frames) if is_ours(each.f_code.co_filename)), default=-1) + 1
        if position := describe_position(frames[first:]):
            self.interrupted = position
            raise Interrupted

    def _now(self) -> tuple[int, float]:
        return self.num_wakes, time.thread_time()

    def _count(self) -> None:
        (wakes, computed_s), self._last = self._last, self._now()
        slept_s = (self._last[0] - wakes - 1) * self.INTERVAL_S
        self.longest_s = max(self.longest_s, slept_s, self._last[1] - computed_s)


def holdings(plugin: object) -> dict[str, int]:
    """Return the size of each collection among a plug-in's attributes, to find state of ended episodes."""
    collections = (dict, list, set, deque, Mapping)
    return {name: len(value) for name, value in attributes(plugin).items() if isinstance(value, collections)}


def attributes(plugin: object) -> Mapping[str, Any]:
    """Return an object's own attributes; empty if it has no `__dict__`."""
    try:
        return vars(plugin)
    except TypeError:
        return {}


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """Return the names of collections that grew with the number of episodes."""
    return sorted(name for name, size in after.items() if size - before.get(name, 0) >= NUM_EPISODES // 2)
