"""The process side of the rollout server: which address, and how it ends.

SIGTERM or SIGINT: no more requests are taken, running episodes get `grace_s` to finish, the rest are replied as errors,
then the process ends. A port in use is passed over for the next free one, and the log says so.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from types import FrameType
from typing import Any

import uvicorn

from polyturn.core.errors import ConfigError
from polyturn.serving.service import RolloutService

logger = logging.getLogger(__name__)

_NUM_PORTS = 100


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host's address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, token: str | None) -> None:
    """Refuse an address that others can reach without a token.

    Raises:
        ConfigError: it is, or the token is empty.
    """
    if token is not None and not token.strip():
        raise ConfigError("the token is empty; give one that cannot be guessed")
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"the server would listen on {host}, where others can reach it, and has no token; set POLYTURN_TOKEN (or "
            "--token-file), or listen on 127.0.0.1"
        )


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to the port, or to the next free one.

    Raises:
        ConfigError: the host is not an address of this machine, or no port is free.
    """
    last = port if port == 0 else min(port + _NUM_PORTS, 65535)
    for candidate in range(port, last + 1):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.socket(family)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, candidate))
            bound.listen(2048)
        except OSError as problem:
            bound.close()
            if candidate == last or not isinstance(problem, OSError) or problem.errno not in (98, 48):
                raise ConfigError(f"cannot listen on {host}:{candidate}: {problem.strerror}") from problem
            continue
        if candidate != port and port != 0:
            logger.warning("port %d is in use; listening on %d instead", port, candidate)
        return bound
    raise AssertionError("the last port is tried")


class _Server(uvicorn.Server):
    """Gives the episodes their time before uvicorn closes the connections."""

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


async def serve(service: RolloutService, app: Any, *, bound: socket.socket, grace_s: float = 30.0) -> None:
    """Serve until a signal asks to stop."""
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=int(grace_s) + 5, lifespan="off")
    server = _Server(config, service, grace_s=grace_s)
    host, port = bound.getsockname()[:2]
    logger.info("listening on http://%s:%d", host, port)
    try:
        await server.serve(sockets=[bound])
    finally:
        await service.stop(0.0)
        await service.context.engine.close()
