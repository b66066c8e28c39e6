"""Calls of reward functions: their rate, and the number of trajectories in each.

    async with rate: ...            waits for its turn: no more calls at once, and none sooner, than the service allows
    await batch(item)               its result, from one call for many items
    with running.one(): ...         an episode runs, and may still bring an item

Separate from `function.py`, which knows the arguments and results of reward functions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

from polyturn.core.aio import PerLoop
from polyturn.core.errors import RewardError
from polyturn.rewards.options import CallRate

T = TypeVar("T")


class CallRateLimit:
    """At most so many calls at once, and calls spread evenly over the minute. Shared by the functions of a run."""

    def __init__(self, rate: CallRate) -> None:
        self._interval_s = 60.0 / rate.per_minute if rate.per_minute else 0.0
        self._next = 0.0
        most = rate.max_concurrent
        self._slots = PerLoop(lambda: contextlib.nullcontext() if most is None else asyncio.Semaphore(most))

    async def __aenter__(self) -> None:
        await self._slots().__aenter__()
        now = asyncio.get_running_loop().time()
        # Reserved before the wait, so that calls which begin side by side are spread as well.
        start = self._next = max(now, self._next)
        self._next += self._interval_s
        try:
            if start > now:
                await asyncio.sleep(start - now)
        except BaseException:
            await self._slots().__aexit__(None, None, None)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self._slots().__aexit__(None, None, None)


class RunningEpisodes:
    """Counts the episodes that run, so that a call for many can wait for all of them.

    Once all of them wait for such calls nothing more can come, and the calls are made.
    """

    IDLE_WAIT_S = 0.05
    """Seconds that a call waits where no episode runs, for trajectories that are scored afterwards."""

    def __init__(self) -> None:
        self._num = 0
        self._batches: list[Batch[Any]] = []

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Count one episode, from its start until it has its reward."""
        self._num += 1
        try:
            yield
        finally:
            self._num -= 1
            self.check()

    @property
    def is_idle(self) -> bool:
        """Whether no episode runs."""
        return self._num == 0

    def join(self, batch: Batch[Any]) -> None:
        """Let a batch wait for all that run."""
        self._batches.append(batch)

    def check(self) -> None:
        """Start the calls if every episode that runs waits for one."""
        if 0 < sum(batch.num_waiting for batch in self._batches) >= self._num:
            for batch in self._batches:
                batch.start()


class Batch(Generic[T]):
    """Collects single items into calls of a function of many.

    A call is made with `size` of them, with those that come within `wait_s`, or with those of all episodes that run.
    """

    def __init__(
        self,
        call: Callable[[Sequence[T]], Awaitable[Sequence[Any]]],
        *,
        size: int | None = None,
        wait_s: float | None = None,
        running: RunningEpisodes | None = None,
    ) -> None:
        """Start with an empty batch.

        Args:
            call: The function of many.
            size: How many it takes at most; None for any number.
            wait_s: How long the first item waits; None until all that run have ended.
            running: Who runs.
        """
        self._call = call
        self._running = RunningEpisodes() if running is None else running
        if wait_s is None:
            self._running.join(self)
        self._size = size
        self._wait_s = wait_s
        self._waiting: list[tuple[T, asyncio.Future[Any]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def __call__(self, item: T) -> Any:
        """Return the result of `item`, once its batch was called.

        Raises:
            Exception: whatever the call raised, for every item of the batch.
        """
        loop = asyncio.get_running_loop()
        self._waiting = [(i, f) for i, f in self._waiting if f.get_loop() is loop]
        result: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((item, result))
        if self._size is not None and len(self._waiting) >= self._size:
            self.start()
        elif self._wait_s is None and not self._running.is_idle:
            self._running.check()
        elif len(self._waiting) == 1:
            self._timer = loop.call_later(RunningEpisodes.IDLE_WAIT_S if self._wait_s is None else self._wait_s, self.start)
        return await result

    @property
    def num_waiting(self) -> int:
        """Number of items that wait for a call."""
        return sum(not result.done() for _, result in self._waiting)

    def start(self) -> None:
        """Make the call with the items that wait."""
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
                raise RewardError(f"it returned {len(returned)} scores for {len(batch)} trajectories")
        except Exception as problem:
            for _, result in batch:
                if not result.done():
                    result.set_exception(problem)
            return
        for (_, result), value in zip(batch, returned, strict=True):
            if not result.done():
                result.set_result(value)
