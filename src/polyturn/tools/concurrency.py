"""ConcurrencyLimits: limits on the concurrent calls of a tool and to a host.

    async with limits.turn("search") as waited_s: ...       a slot of the tool, then a slot of its host

Waiting does not count towards a call's deadline, only towards the episode's time limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from polyturn.core.errors import ConfigError
from polyturn.infra.aio import PerLoop


class ConcurrencyLimits:
    """The limits of a run's tools."""

    def __init__(
        self, *, of_tools: Mapping[str, int], hosts: Mapping[str, str | None], max_per_host: int | None = None
    ) -> None:
        """Make the limits.

        Args:
            of_tools: Tool name -> maximum number of concurrent calls; other tools have no limit.
            hosts: Tool name -> the host that it calls, or None.
            max_per_host: Maximum number of concurrent calls to one host, over all tools.

        Raises:
            ConfigError: a limit is below 1.
        """
        for what, value in [*of_tools.items(), ("each host", max_per_host)]:
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"max_concurrency of {what} is {value!r}; use a whole number of at least 1")

        def limit(size: int) -> PerLoop[asyncio.Semaphore]:
            return PerLoop(lambda: asyncio.Semaphore(size))

        shared = {host: limit(max_per_host) for host in set(hosts.values()) if host and max_per_host}
        self._limits: dict[str, list[Callable[[], asyncio.Semaphore]]] = {}
        for tool, host in hosts.items():
            own = [limit(of_tools[tool])] if tool in of_tools else []
            self._limits[tool] = [*own, *([shared[host]] if host in shared else [])]

    def has_limit(self, tool: str) -> bool:
        """Whether calls of the tool may have to wait."""
        return bool(self._limits[tool])

    @asynccontextmanager
    async def turn(self, tool: str) -> AsyncIterator[float]:
        """Hold a slot of the tool and of its host; yield the seconds spent waiting."""
        clock = asyncio.get_running_loop().time
        began = clock()
        async with AsyncExitStack() as slots:
            for limit in self._limits[tool]:  # the host's limit is always last, which prevents a deadlock
                await slots.enter_async_context(limit())
            yield clock() - began
