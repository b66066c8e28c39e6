"""How reward functions are called: how often, and how many trajectories at a time.

    async with rate: ...            waits for its turn: no more calls at once, and none sooner, than the service allows
    await batch(item)               its result, from one call for many items

Separate from `function.py`, which knows what a function is told and what it may return.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

from polyturn.core.errors import RewardError
from polyturn.rewards.written import TextOf

T = TypeVar("T")


class RateLimit:
    """At most so many calls at once, and calls spread evenly over the minute. Shared by the functions of a run."""

    def __init__(self, *, max_concurrent: int | None = None, calls_per_minute: float | None = None) -> None:
        self._max_concurrent = max_concurrent
        self._interval_s = 60.0 / calls_per_minute if calls_per_minute else 0.0
        self._next = 0.0
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def __aenter__(self) -> None:
        slots = self._of_this_loop()
        if slots is not None:
            await slots.acquire()
        now = time.monotonic()
        start = self._next = max(now, self._next)
        self._next += self._interval_s
        try:
            if start > now:
                await asyncio.sleep(start - now)
        except BaseException:
            if slots is not None:
                slots.release()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if (slots := self._of_this_loop()) is not None:
            slots.release()

    def _of_this_loop(self) -> asyncio.Semaphore | None:
        if self._max_concurrent is None:
            return None
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self._max_concurrent)
        return self._slots[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """How the reward functions of a run are called."""

    timeout_s: float = 60.0
    """Deadline of one call; waiting for a turn does not count."""
    text: TextOf = "answer"
    """What a function of `solution_str` reads."""
    rate: RateLimit | None = None
    batch_size: int = 64
    """Trajectories in one call of a function of `solution_strs`."""
    batch_wait_s: float = 0.05
    """How long such a call waits for more of them."""


class Batch(Generic[T]):
    """Collects single items into calls of a function of many: up to `size` of them, or those that come within `wait_s`."""

    def __init__(self, call: Callable[[Sequence[T]], Awaitable[Sequence[Any]]], *, size: int, wait_s: float) -> None:
        self._call = call
        self._size = size
        self._wait_s = wait_s
        self._waiting: list[tuple[T, asyncio.Future[Any]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, item: T) -> Any:
        """Return the result of `item`, once its batch was called.

        Raises:
            Exception: whatever the call raised, for every item of the batch.
        """
        loop = asyncio.get_running_loop()
        self._waiting = [(i, f) for i, f in self._waiting if f.get_loop() is loop]
        result: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((item, result))
        if len(self._waiting) >= self._size:
            self._start()
        elif len(self._waiting) == 1:
            self._timer = loop.call_later(self._wait_s, self._start)
        return await result

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        batch, self._waiting = [(i, f) for i, f in self._waiting if not f.done()], []
        if batch:
            task = asyncio.get_running_loop().create_task(self._run(batch))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(self, batch: Sequence[tuple[T, asyncio.Future[Any]]]) -> None:
        try:
            returned = list(await self._call([item for item, _ in batch]))
            if len(returned) != len(batch):
                raise RewardError(f"it returned {len(returned)} scores for {len(batch)} trajectories")
        except Exception as problem:
            for _, result in batch:
                if not result.done():
                    result.set_exception(problem)
            return
        for (_, result), value in zip(batch, returned, strict=True):
            if not result.done():
                result.set_result(value)
