"""ServerSupervisor: a server that is started, and started again when it has died or hangs, so often and no more.

supervisor = ServerSupervisor(spec, max_restarts=3)
server = await supervisor.start()          once, however many ask
server = await supervisor.again("it was killed")
"""

from __future__ import annotations

import asyncio
import logging

from polyturn.core.errors import EngineGoneError
from polyturn.engines.launcher import LaunchSpec, RunningServer, Server, StartServer

logger = logging.getLogger(__name__)


class ServerSupervisor:
    """Holds one server at a time."""

    def __init__(self, spec: LaunchSpec, *, max_restarts: int = 3, start: StartServer = Server.start) -> None:
        """Take how the server is started; `start` does it, on this machine or elsewhere."""
        self.spec = spec
        self._start = start
        self.max_restarts = max_restarts
        self._lock = asyncio.Lock()
        self.server: RunningServer | None = None
        self.num_restarts = 0

    async def start(self) -> RunningServer:
        """Return the server, started if none was.

        Raises:
            EngineError: it did not come up.
        """
        async with self._lock:
            if self.server is None:
                self.server = await self._start(self.spec)
                logger.info("started a server at %s", self.server.url)
            return self.server

    async def again(self, why: str) -> RunningServer:
        """Stop what is left of the server and start another.

        Raises:
            EngineGoneError: it was started again as often as it may be.
            EngineError: it did not come up.
        """
        async with self._lock:
            if self.num_restarts >= self.max_restarts:
                raise EngineGoneError(
                    f"{why}, and it was started again {self.num_restarts} times already (engine.launch.max_restarts)"
                )
            self.num_restarts += 1
            if self.server is not None:
                logger.warning("%s; the last lines of its log:\n%s", why, await self.server.last_lines())
                await self.server.stop()
            self.server = await self._start(self.spec)
            logger.info("started a server again, at %s", self.server.url)
            return self.server

    async def stop(self) -> None:
        """Stop the server, if one runs."""
        async with self._lock:
            if self.server is not None:
                await self.server.stop()
                self.server = None
