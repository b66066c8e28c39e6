"""EpisodeSlots: limits the number of episodes in flight, to a fixed number or to one that follows the engine's load.

    EpisodeSlots(most=256)                            always 256
    EpisodeSlots(most=256, least=16, engine=engine)   16 at first; changes every second while an episode waits for a slot:
        no request waits in the engine, KV cache below `ROOMY`   doubles; once it has shrunk, it only grows by an eighth
        requests wait in the engine, or KV cache above `FULL`    shrinks by their number, at least 1, at most a quarter

A running episode is never stopped: if the number shrinks, waiting episodes start later.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from types import TracebackType

from polyturn.core.protocols import Engine, LoadedEngine

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two checks of the engine's load."""
FULL, ROOMY = 0.95, 0.85
"""Fractions of the KV cache in use above which the number shrinks, and below which it grows."""


class EpisodeSlots:
    """A fair semaphore whose size may change; `async with slots:` holds one slot."""

    def __init__(self, *, most: int, least: int | None = None, engine: Engine | None = None) -> None:
        """Begin with all slots free.

        Args:
            most: Maximum number of slots; without `least`, the fixed number.
            least: Minimum and initial number of slots.
            engine: The engine whose load sets the number in between.
        """
        self.most, self.least = most, most if least is None else min(least, most)
        self.limit = self.least
        """The current number of slots."""
        self._engine = engine
        self._num_held = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._watch: asyncio.Task[None] | None = None
        self._has_shrunk = self._is_warned = False

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
            if turn.done() and not turn.cancelled():  # the slot was assigned just before the cancellation
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
        while self._waiting:
            await asyncio.sleep(LOOK_S)
            self.adjust()

    def adjust(self) -> None:
        """Check the engine's load once, and change the number of slots."""
        load = self._engine.load if isinstance(self._engine, LoadedEngine) else None
        if load is not None and (load.queue > 0 or load.kv_use > FULL):
            self._has_shrunk = True
            self.limit = max(self.least, self.limit - max(1, min(int(load.queue), self.limit // 4)))
        elif self._num_held >= self.limit < self.most and (load is None or load.kv_use < ROOMY):
            self.limit = min(self.most, self.limit + (max(1, self.limit // 8) if self._has_shrunk else self.limit))
            if load is None and self.limit == self.most and not self._is_warned:
                self._is_warned = True
                logger.warning("the engine reports no load, so up to rollout.max_concurrent episodes run at once")
        self._admit()
