"""ConcurrencyLimits: bounds on the running calls of a tool and of a host, and the queue behind them.

    async with limits.turn("search", owner="g3/1") as waited_s: ...       a slot of the tool, then one of its host

Episodes take turns: one that makes sixteen calls at once does not keep the others waiting for all of them. Waiting is no
part of a call's own deadline; the episode's ends it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from polyturn.core.errors import ConfigError


class FairLimit:
    """At most `size` holders at once; those who wait are served owner by owner."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By owner, the one whose turn is next first."""

    @property
    def num_waiting(self) -> int:
        """Number of calls that wait for their turn."""
        return sum(map(len, self._waiting.values()))

    async def acquire(self, owner: str) -> None:
        """Wait for a slot."""
        if self._free > 0:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # the slot was given while the cancellation was on its way
            else:
                self._forget(owner, turn)
            raise

    def release(self) -> None:
        """Give a slot back, to whose turn it is."""
        while self._waiting:
            owner = next(iter(self._waiting))
            queue = self._waiting.pop(owner)
            turn = queue.popleft()
            if queue:
                self._waiting[owner] = queue  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def _forget(self, owner: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(owner)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[owner]


class ConcurrencyLimits:
    """The limits of a run's tools."""

    def __init__(
        self, *, of_tools: Mapping[str, int], hosts: Mapping[str, str | None], max_per_host: int | None = None
    ) -> None:
        """Make the limits.

        Args:
            of_tools: Tool -> calls at once; a tool that is left out has no limit.
            hosts: Tool -> whom it asks, or None.
            max_per_host: Calls at once to one host, of all tools that ask it.

        Raises:
            ConfigError: a limit is below 1.
        """
        for what, value in [*of_tools.items(), ("each host", max_per_host)]:
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"max_concurrency of {what} is {value!r}; use a whole number of at least 1")
        shared = {host: FairLimit(max_per_host) for host in set(hosts.values()) if host and max_per_host}
        self._limits: dict[str, list[FairLimit]] = {}
        for tool, host in hosts.items():
            own = [FairLimit(of_tools[tool])] if tool in of_tools else []
            self._limits[tool] = own + ([shared[host]] if host in shared else [])

    def has_limit(self, tool: str) -> bool:
        """Whether calls of the tool may have to wait."""
        return bool(self._limits[tool])

    @asynccontextmanager
    async def turn(self, tool: str, *, owner: str) -> AsyncIterator[float]:
        """Hold a slot of the tool and of its host; gives the seconds that were waited."""
        limits: list[FairLimit] = []
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            for limit in self._limits[tool]:  # the host's always last, so that no cycle of waiting can form
                await limit.acquire(owner)
                limits.append(limit)
            yield clock() - began
        finally:
            for limit in limits:
                limit.release()
