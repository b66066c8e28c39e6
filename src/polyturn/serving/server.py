"""The process of the rollout server: it listens on an address until a signal stops it.

On SIGTERM or SIGINT the server refuses new requests, running episodes get `grace_s` seconds to finish, the rest are replied
as errors, and the process ends.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from types import FrameType
from typing import Any

import uvicorn

from polyturn.serving.auth import ServerRules
from polyturn.serving.listen import http_config
from polyturn.serving.rollout_service import RolloutService

logger = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """Lets running episodes finish before uvicorn closes the connections."""

    def __init__(self, config: uvicorn.Config, service: RolloutService, *, grace_s: float) -> None:
        super().__init__(config)
        self._service = service
        self._grace_s = grace_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin_stop)
        self.force_exit = self.should_exit  # a second signal does not wait
        self.should_exit = True

    def _begin_stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._service.stop(self._grace_s))


async def serve(
    service: RolloutService, app: Any, *, bound: socket.socket, rules: ServerRules, grace_s: float = 30.0
) -> None:
    """Serve until SIGTERM or SIGINT."""
    config = http_config(app, rules, timeout_graceful_shutdown=int(grace_s) + 5)
    server = _Server(config, service, grace_s=grace_s)
    host, port = bound.getsockname()[:2]
    logger.info("listening on http://%s:%d", host, port)
    try:
        await server.serve(sockets=[bound])
    finally:
        await service.stop(0.0)
        await service.context.close()
