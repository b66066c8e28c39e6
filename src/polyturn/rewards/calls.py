"""Limits the rate of calls of reward functions, and batches trajectories into one call.

    async with rate: ...            waits until the service's limits on concurrent calls and calls per minute allow the call
    await batch(item)               returns the item's result, from one call for several items

Arguments and results of reward functions are in `function.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

from polyturn.core.errors import RewardError
from polyturn.infra.aio import Pace, PerLoop
from polyturn.rewards.options import CallRate

T = TypeVar("T")


class CallRateLimit:
    """Limits the number of concurrent calls, and spreads calls evenly over a minute. Shared by the functions of a run."""

    def __init__(self, rate: CallRate) -> None:
        self._pace = Pace(rate.per_minute / 60.0) if rate.per_minute else None
        most = rate.max_concurrent
        self._slots = PerLoop(lambda: contextlib.nullcontext() if most is None else asyncio.Semaphore(most))

    async def __aenter__(self) -> None:
        await self._slots().__aenter__()
        try:
            if self._pace is not None:
                await self._pace.wait()
        except BaseException:
            await self._slots().__aexit__(None, None, None)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self._slots().__aexit__(None, None, None)


class Batch(Generic[T]):
    """Collects items and passes several of them to a function in one call.

    The function is called as soon as `size` items wait, or `wait_s` seconds after the first of them arrived.
    """

    def __init__(
        self,
        call: Callable[[Sequence[T]], Awaitable[Sequence[Any]]],
        *,
        size: int | None,
        wait_s: float,
    ) -> None:
        """Start with an empty batch.

        Args:
            call: The function that takes many items.
            size: Largest number of items in a call; None means no limit.
            wait_s: Seconds that the first item waits for others.
        """
        self._call = call
        self._size = size
        self._wait_s = wait_s
        self._waiting: list[tuple[T, asyncio.Future[Any]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def __call__(self, item: T) -> Any:
        """Add `item` to the current batch, wait for the batch's call, and return the result for `item`.

        Raises:
            Exception: the error of the call, for every item of the batch.
        """
        loop = asyncio.get_running_loop()
        self._waiting = [(i, f) for i, f in self._waiting if f.get_loop() is loop]
        result: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((item, result))
        if self._size is not None and len(self._waiting) >= self._size:
            self.start()
        elif len(self._waiting) == 1:
            self._timer = loop.call_later(self._wait_s, self.start)
        return await result

    def start(self) -> None:
        """Call the function with all waiting items now."""
        if self._timer is not None:
            self._timer.cancel()
        batch, self._waiting = [(i, f) for i, f in self._waiting if not f.done()], []
        if batch:
            task = asyncio.get_running_loop().create_task(self._run(batch))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def _run(self, batch: Sequence[tuple[T, asyncio.Future[Any]]]) -> None:
        try:
            returned = list(await self._call([item for item, _ in batch]))
            if len(returned) != len(batch):
                raise RewardError(f"{len(returned)} scores were returned for {len(batch)} trajectories; return one for each")
        except Exception as problem:
            for _, result in batch:
                if not result.done():
                    result.set_exception(problem)
            return
        for (_, result), value in zip(batch, returned, strict=True):
            if not result.done():
                result.set_result(value)
