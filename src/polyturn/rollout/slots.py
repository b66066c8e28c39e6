"""EpisodeSlots: how many episodes are in flight, a fixed number or one that follows the engine's load.

    EpisodeSlots(most=256)                            always 256
    EpisodeSlots(most=256, least=16, engine=engine)   16 at first; adjusted every second while an episode waits:
        no request waits there, the KV cache has room   grows until four fifths of it should be used, at most doubles
        requests wait, or the KV cache is nearly full   shrinks by as many as wait, at most by a quarter

Why four fifths: the rest holds the conversations that wait for a tool. Without it their next turns are computed from the
start. Separate from the pool, which runs the groups. An episode that has begun is never stopped: a smaller number means
that further ones begin later.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from statistics import fmean
from types import TracebackType

from polyturn.core.protocols import Engine, EngineLoad, LoadedEngine

logger = logging.getLogger(__name__)

ADJUST_S, NUM_LOOKS = 1.0, 8
"""Seconds between two changes, and how often the engine is looked at for each."""
FULL, AIM = 0.95, 0.8
"""Shares of the KV cache above which the number shrinks, and up to which it grows."""


class EpisodeSlots:
    """A semaphore whose size may change; `async with slots:` holds one slot, which the longest waiting gets first."""

    def __init__(self, *, most: int, least: int | None = None, engine: Engine | None = None) -> None:
        """Begin with all slots free.

        Args:
            most: Slots at most; without `least`, at any time.
            least: Slots at least, and at first.
            engine: Its load says how many there are in between.
        """
        self.most, self.least = most, most if least is None else min(least, most)
        self.limit = self.least
        """The present number of slots."""
        self._engine = engine
        self._num_held = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._watch: asyncio.Task[None] | None = None
        self._looks: list[EngineLoad] = []
        self._is_warned = False

    async def __aenter__(self) -> None:
        if self._num_held < self.limit and not self._waiting:
            self._num_held += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        if self.least < self.most and (self._watch is None or self._watch.done()):
            self._watch = asyncio.create_task(self._follow(), name="concurrency")
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given a slot at the same moment
                self._free()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._free()

    def _free(self) -> None:
        self._num_held -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._num_held < self.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self._num_held += 1
                turn.set_result(None)

    async def _follow(self) -> None:
        """Adjust the number while an episode waits for a slot."""
        self._looks.clear()
        while self._waiting:
            for _ in range(NUM_LOOKS):
                await asyncio.sleep(ADJUST_S / NUM_LOOKS)
                self.look()
            self.adjust()

    def look(self) -> None:
        """Read the load once."""
        if isinstance(self._engine, LoadedEngine) and (load := self._engine.load) is not None:
            self._looks.append(load)

    def adjust(self) -> None:
        """Change the number of slots by the mean load since the last call."""
        looks, self._looks = self._looks, []
        if not looks:
            self.limit = min(self.most, 2 * self.limit)
            if self.limit == self.most and not self._is_warned:
                self._is_warned = True
                logger.warning("the engine reports no load, so that rollout.max_concurrent episodes are in flight")
            return self._admit()
        queue, kv_use = fmean(look.queue for look in looks), fmean(look.kv_use for look in looks)
        if queue >= 1 or kv_use > FULL:
            self.limit = max(self.least, self.limit - max(1, min(int(queue), self.limit // 4)))
        elif self._num_held >= self.limit:
            aimed = int(self.limit * min(2.0, AIM / max(kv_use, AIM / 2)))
            self.limit = min(self.most, max(self.limit, aimed))
        self._admit()
