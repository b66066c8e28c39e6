"""How servers listen: on this machine only unless a token is required, and within uvicorn's limits.

    bound = bind("127.0.0.1", 8000)                      the next free port, with a warning
    await serve_until_signal(app, rules, bound)
    async with serving(app, rules, bound): …             the same, next to other work on the loop

uvicorn parses with httptools, which refuses ambiguous requests (two lengths, a chunked body with a length) but does not
limit the size of a head; `BoundedHeads` adds that limit. uvicorn's other parser, h11, has the limit but needs a fifth more
CPU time per request.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from polyturn.core.errors import ConfigError
from polyturn.infra.aio import finish
from polyturn.serving.auth import ServerRules, check_token, is_loopback

logger = logging.getLogger(__name__)

_NUM_PORTS = 100
MIN_TOKEN = 16
"""Fewest characters of a token on an address that other machines can reach."""
MAX_HEAD_BYTES = 32 << 10


def check_exposure(host: str, token: str | None) -> None:
    """Refuse an address that other machines can reach unless a long token protects it.

    Raises:
        ConfigError: the address is exposed, and the token is missing, malformed or too short.
    """
    check_token(token)
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"the server would listen on {host}, where other machines can reach it, without a token; set POLYTURN_TOKEN "
            "(or --token-file), or listen on 127.0.0.1"
        )
    if token is not None and not is_loopback(host) and len(token) < MIN_TOKEN:
        raise ConfigError(
            f"the token has {len(token)} characters, and other machines can reach {host}; use {MIN_TOKEN} or more, for "
            "example from `openssl rand -hex 24`"
        )


def bind(host: str, port: int, *, is_only: bool = False) -> socket.socket:
    """Return a socket bound to a port; if the port is in use and not `is_only`, to the next free one.

    Raises:
        ConfigError: the host is not an address of this machine, the port is out of range, or no port is free.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"the port is {port}; use a number from 0 (any free port) to 65535")
    last = port if port == 0 or is_only else min(port + _NUM_PORTS, 65535)
    for candidate in range(port, last + 1):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.socket(family)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, candidate))
            bound.listen(2048)
        except OSError as problem:
            bound.close()
            is_in_use = problem.errno == errno.EADDRINUSE
            if candidate == last or not is_in_use:
                hint = "; stop its program, or use another port (0 is any free one)" if is_in_use else ""
                raise ConfigError(f"cannot listen on {host}:{candidate}: {problem.strerror}{hint}") from problem
            continue
        if candidate != port and port != 0:
            logger.warning("port %d is in use; listening on %d instead", port, candidate)
        return bound
    raise AssertionError("the last port is tried")


def origin_of(bound: socket.socket, *, host: str | None = None) -> str:
    """Return http://HOST:PORT of a listening socket; `host` replaces its address."""
    address, port = bound.getsockname()[:2]
    name = host or address
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def http_config(app: Any, rules: ServerRules, **options: Any) -> uvicorn.Config:
    """Return uvicorn's settings for an application with access rules.

    Requests are not logged, because their addresses may hold a token. A header cannot change the client's address, and no
    connection is upgraded to another protocol.

    Args:
        app: The application; the rules are already its middleware.
        rules: The access rules, of which uvicorn enforces the limit on connections.
        options: Further settings of uvicorn.
    """
    settings: dict[str, Any] = {
        "log_level": "warning",
        "access_log": False,
        "log_config": None,  # records go to the root logger, which removes secrets
        "lifespan": "off",
        "http": BoundedHeads,
        "limit_concurrency": rules.max_requests,
        "ws": "none",
        "proxy_headers": False,
        "server_header": False,
    }
    return uvicorn.Config(app, **(settings | options))


class BoundedHeads(HttpToolsProtocol):
    """uvicorn's protocol with a limit on the bytes it reads before a head, chunk size or trailer is complete."""

    _num_unparsed = 0

    def data_received(self, data: bytes) -> None:
        """Parse the data; refuse a head that is too long."""
        self._num_unparsed += len(data)
        super().data_received(data)
        if self._num_unparsed > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of a request is longer than {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        """Start answering a request; if it asks for a protocol upgrade, it is the connection's last."""
        self._num_unparsed = 0
        super().on_headers_complete()
        self.headers = []  # trailers after the body go here and not to the application
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._num_unparsed = 0
        super().on_body(body)


class _Beside(uvicorn.Server):
    """A server that runs next to other work and leaves the process's signals alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(app: Any, rules: ServerRules, bound: socket.socket, **options: Any) -> AsyncIterator[None]:
    """Serve while the context is open, on the running event loop; `options` go to uvicorn."""
    server = _Beside(http_config(app, rules, timeout_graceful_shutdown=1, **options))
    running = asyncio.create_task(server.serve(sockets=[bound]), name="polyturn-server")
    up = asyncio.create_task(server.is_up.wait())
    try:
        await asyncio.wait([running, up], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        yield
    finally:
        up.cancel()
        server.should_exit = True
        _, cancelled = await finish(running)  # a second cancellation would leave the port open
        if cancelled is not None:
            raise cancelled


async def serve_until_signal(
    app: Any,
    rules: ServerRules,
    bound: socket.socket,
    *,
    stop: Callable[[], Coroutine[Any, Any, None]] | None = None,
    **options: Any,
) -> None:
    """Serve until SIGTERM or SIGINT, then answer the requests in progress; a second signal does not wait for them.

    Args:
        app: The application.
        rules: Its access rules.
        bound: The socket to listen on.
        stop: Ends the work behind the requests; started at the first signal.
        options: Further settings of uvicorn.
    """
    server = _Beside(http_config(app, rules, **options))
    stopping: list[asyncio.Task[None]] = []

    def end() -> None:
        if stop is not None and not stopping:
            stopping.append(asyncio.create_task(stop()))
        server.force_exit = server.should_exit
        server.should_exit = True

    on_signal(end)
    await server.serve(sockets=[bound])


def on_signal(call: Callable[[], None]) -> None:
    """Call a function on the running event loop at every SIGTERM and SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, call)
