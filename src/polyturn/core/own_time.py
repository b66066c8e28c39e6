"""OwnTime: the time that an author's code has been working by itself, since it last asked the library for something.

    async def step(self, episode, turn):       0 s
        more = await search(turn.text)         its own time
        await episode.generate()               the library's: the clock stands still, and starts again at 0
        return summarise(more)                 its own time

So a deadline for code that may rightly wait for an engine for minutes need not be longer than one of its own awaits.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from polyturn.core.aio import loop_clock

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

_RUNNING: ContextVar[tuple[OwnTime, ...]] = ContextVar("polyturn_own_time", default=())


class OwnTime:
    """The clock of one call of an author's method; the tasks that it starts share it."""

    __slots__ = ("_now", "_num_asked", "_since")

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        """Start the clock.

        Args:
            now: Returns the time in seconds; the clock of the running event loop by default.
        """
        self._now = now or loop_clock()
        self._num_asked = 0
        self._since = self._now()

    @property
    def seconds(self) -> float:
        """Seconds that the code has been working by itself; 0 while the library works for it."""
        return 0.0 if self._num_asked else self._now() - self._since

    @contextmanager
    def running(self) -> Iterator[OwnTime]:
        """Make this the clock of the calls that are made, and of the tasks that are started, inside the block."""
        token = _RUNNING.set((*_RUNNING.get(), self))
        try:
            yield self
        finally:
            _RUNNING.reset(token)

    def from_its_begin(self, work: Callable[[], _Result]) -> Callable[[], _Result]:
        """Return a plain function that starts the clock when it begins: waiting for a thread is not its time."""
        self._num_asked += 1

        def begun() -> _Result:
            self._num_asked -= 1
            self._since = self._now()
            return work()

        return begun

    @staticmethod
    @contextmanager
    def asked() -> Iterator[None]:
        """Stop the callers' clocks inside the block, in which the library works for them."""
        clocks = _RUNNING.get()
        for clock in clocks:
            clock._num_asked += 1
        try:
            yield
        finally:
            for clock in clocks:
                clock._num_asked -= 1
                clock._since = clock._now()


def not_own_time(method: Callable[_Args, Awaitable[_Result]]) -> Callable[_Args, Awaitable[_Result]]:
    """Mark an async method of the library that plug-ins await; its time is excluded from the plug-in's deadline."""

    async def timed(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        with OwnTime.asked():
            return await method(*args, **kwargs)

    @functools.wraps(method)
    def call(*args: _Args.args, **kwargs: _Args.kwargs) -> Awaitable[_Result]:
        # Our own code runs under no author's clock, and pays for none.
        return timed(*args, **kwargs) if _RUNNING.get() else method(*args, **kwargs)

    return call
