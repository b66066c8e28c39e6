"""EpisodeClock: how long an episode has been going on, and the time limit that goes by it.

    model and tools   ──────────┐            ┌────────      counts
    a person                    └─ answers ──┘               does not count, unless the run says that it does

Separate because two things read it: the limits, before each turn, and what cuts a call that is under way. A person who is
asked for an answer has a deadline of their own, so that leaving them their time lets nothing hang.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class EpisodeClock:
    """The seconds of one episode; its forks share it."""

    __slots__ = ("_before_s", "_limit_s", "_num_still", "_since", "_timeout")

    def __init__(self) -> None:
        """Begin to run."""
        self._before_s = 0.0
        self._since = time.monotonic()
        self._num_still = 0
        self._timeout: asyncio.Timeout | None = None
        self._limit_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds that count since the episode began, the time between two processes left out."""
        return self._before_s + (0.0 if self._num_still else time.monotonic() - self._since)

    def set(self, elapsed_s: float) -> None:
        """Go on from where an earlier process left it."""
        self._before_s, self._since = elapsed_s, time.monotonic()

    @asynccontextmanager
    async def within(self, limit_s: float | None) -> AsyncIterator[asyncio.Timeout]:
        """Cancel what is done inside the block once the clock shows `limit_s`; None is no limit.

        Raises:
            TimeoutError: it does, and the time-out has `expired`.
        """
        self._limit_s = limit_s
        async with asyncio.timeout(self._rest_s()) as self._timeout:
            try:
                yield self._timeout
            finally:
                self._timeout = None

    @contextmanager
    def still(self) -> Iterator[None]:
        """Let the clock stand still inside the block; blocks may overlap."""
        if not self._num_still:
            self._before_s = self.elapsed_s
        self._num_still += 1
        self._reschedule()
        try:
            yield
        finally:
            self._num_still -= 1
            if not self._num_still:
                self._since = time.monotonic()
                self._reschedule()

    def _rest_s(self) -> float | None:
        return None if self._limit_s is None else max(0.0, self._limit_s - self.elapsed_s)

    def _reschedule(self) -> None:
        if self._timeout is None or self._timeout.expired():
            return
        rest_s = None if self._num_still else self._rest_s()
        self._timeout.reschedule(None if rest_s is None else asyncio.get_running_loop().time() + rest_s)
