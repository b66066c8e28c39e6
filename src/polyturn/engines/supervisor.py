"""ServerSupervisor: start a server, and restart it a limited number of times if it dies or hangs.

supervisor = ServerSupervisor(spec, max_restarts=3)
server = await supervisor.start()          started only once
server = await supervisor.again("it was killed")
"""

from __future__ import annotations

import asyncio
import logging

from polyturn.core.errors import EngineGoneError
from polyturn.engines.launcher import LaunchSpec, RunningServer, Server, StartServer

logger = logging.getLogger(__name__)


class ServerSupervisor:
    """Manages one server."""

    def __init__(self, spec: LaunchSpec, *, max_restarts: int = 3, start: StartServer = Server.start) -> None:
        """Manage a server with this spec; `start` starts it, on this machine or elsewhere."""
        self.spec = spec
        self._start = start
        self.max_restarts = max_restarts
        self._lock = asyncio.Lock()
        self.server: RunningServer | None = None
        self.num_restarts = 0

    async def start(self) -> RunningServer:
        """Return the server; start it if there is none.

        Raises:
            EngineError: the server did not come up.
        """
        async with self._lock:
            if self.server is None:
                self.server = await self._start(self.spec)
                logger.info("started a server at %s", self.server.url)
            return self.server

    async def again(self, why: str) -> RunningServer:
        """Stop the server's remaining processes, and start the server again.

        Raises:
            EngineGoneError: no restart is left.
            EngineError: the server did not come up.
        """
        async with self._lock:
            if self.num_restarts >= self.max_restarts:
                times = f"{self.num_restarts} time{'s' * (self.num_restarts != 1)}"
                raise EngineGoneError(
                    f"{why}, and the server has been restarted {times} already; see its log, or raise "
                    "engine.launch.max_restarts"
                )
            self.num_restarts += 1
            if self.server is not None:
                logger.warning("%s; the last lines of its log:\n%s", why, await self.server.last_lines())
                await self.server.stop()
            self.server = await self._start(self.spec)
            logger.info("restarted a server at %s", self.server.url)
            return self.server

    async def stop(self) -> None:
        """Stop the server, if one runs."""
        async with self._lock:
            if self.server is not None:
                await self.server.stop()
                self.server = None
