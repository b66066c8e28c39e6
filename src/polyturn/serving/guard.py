"""The rules of `rules.py` in front of an ASGI application (FastAPI, Starlette, the MCP SDK's), and uvicorn told of them.

    guarded(app, ServerRules(token=…))                      refuses, bounds, times out, and answers a crash with one sentence
    body = await json_object(request)                       a body that is a JSON object, or a 4xx
    uvicorn.Server(http_config(app, rules)).run(sockets=[bound])
    async with serving(app, rules, bound): …                the same beside other work on the loop

Nothing here knows what an application does. A crash of it is logged without what the request held.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polyturn.serving.connection import Connection
from polyturn.serving.rules import Refusal, RequestPolicy, ServerRules, query_token
from polyturn.serving.wire import BodyError, dumps, read_object

logger = logging.getLogger(__name__)

_PER_S = 64 << 10
"""Bytes of a body that a second more is given for."""


Say = Callable[[str, Refusal], Any]
"""(path, refusal) -> the JSON value that the client is told."""


def _detail(path: str, refusal: Refusal) -> Any:
    return {"detail": refusal.message}


class Guard:
    """An ASGI application in front of another."""

    def __init__(self, app: ASGIApp, gate: RequestPolicy, say: Say = _detail) -> None:
        self._app = app
        self._gate = gate
        self._say = say

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        path, address = scope["path"], (scope.get("client") or ("", 0))[0]
        refused = self._gate.refusal(scope["method"], path, headers, address)
        if refused is None or refused.status == 401:
            refused = self._entry(scope) or refused
        with self._gate.place() as full:
            if (refused := refused or full) is not None:
                await self._answer(send, path, refused)
                return
            await self._pass(scope, receive, send, limit=self._gate.max_body(path))

    def _entry(self, scope: Scope) -> Refusal | None:
        """Return the redirect of a browser that opens a page with the token in its address: a cookie takes its place."""
        rules = self._gate.rules
        token = query_token(scope.get("query_string", b"").decode("latin-1")) if rules.cookie else None
        if token is None or scope["method"] != "GET" or not self._gate.is_token(token):
            return None
        cookie = f"{rules.cookie}={token}; Path=/; HttpOnly; SameSite=Strict"
        where = "/" + quote(scope["path"].lstrip("/\\"))
        return Refusal(303, "", {"Location": where, "Set-Cookie": cookie, "Cache-Control": "no-store"})

    async def _pass(self, scope: Scope, receive: Receive, send: Send, *, limit: int) -> None:
        bounded = _Bounded(receive, send, limit=limit, body_s=self._gate.rules.body_s)
        try:
            await self._app(scope, bounded.receive, bounded.send)
        except ClientDisconnect:
            pass
        except Exception as problem:
            # The message may quote the request, so only the kind of it leaves this machine.
            logger.exception("a request to %s %.80s broke", scope["method"], scope["path"])
            bounded.refused = bounded.refused or Refusal(500, f"the server failed: {type(problem).__name__}")
        if bounded.refused is not None and not bounded.has_begun:
            await self._answer(send, scope["path"], bounded.refused)

    async def _answer(self, send: Send, path: str, refusal: Refusal) -> None:
        body = dumps(self._say(path, refusal)) if refusal.message else b""
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "X-Content-Type-Options": "nosniff",
            "Connection": "close",
            **refusal.headers,
        }
        encoded = [(k.lower().encode(), v.encode("latin-1")) for k, v in headers.items()]
        await send({"type": "http.response.start", "status": refusal.status, "headers": encoded})
        await send({"type": "http.response.body", "body": body})


class _Bounded:
    """The two ends of one request, with a bound on its body and on the time that it takes to come."""

    def __init__(self, receive: Receive, send: Send, *, limit: int, body_s: float) -> None:
        self._receive = receive
        self._send = send
        self._limit = limit
        self._left_s = body_s
        self._size = 0
        self._is_whole = False
        self.refused: Refusal | None = None
        self.has_begun = False

    async def receive(self) -> Message:
        if self._is_whole:
            return await self._receive()
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            async with asyncio.timeout(self._left_s):
                message = await self._receive()
        except TimeoutError:
            return self._refuse(Refusal(408, "the body did not come in time"))
        size = len(message.get("body", b""))
        self._left_s += size / _PER_S - (loop.time() - start)
        self._size += size
        self._is_whole = not message.get("more_body", False)
        if self._size > self._limit:
            return self._refuse(Refusal(413, f"the body is larger than {self._limit} bytes"))
        return message

    async def send(self, message: Message) -> None:
        if self.refused is not None and not self.has_begun:
            return  # what the application says of a body that it did not get is not the reason
        self.has_begun = True
        await self._send(message)

    def _refuse(self, refusal: Refusal) -> Message:
        self._is_whole = True
        self.refused = refusal
        return {"type": "http.disconnect"}


def guarded(app: Starlette, rules: ServerRules, *, say: Say = _detail) -> RequestPolicy:
    """Put the rules in front of an application, and return their counters.

    Args:
        app: Middleware that is added to it later stands in front of the rules.
        rules: What is demanded.
        say: How a refusal is written.
    """
    gate = RequestPolicy(rules)
    app.add_middleware(Guard, gate=gate, say=say)
    return gate


async def json_object(request: Request) -> dict[str, Any]:
    """Return a request's body, a JSON object.

    Raises:
        HTTPException: 422, it is none.
    """
    try:
        return await read_object(await request.body())
    except BodyError as problem:
        raise HTTPException(422, str(problem)) from problem


def http_config(app: Any, rules: ServerRules, **options: Any) -> uvicorn.Config:
    """Return uvicorn's settings for an application under rules.

    Addresses of requests may hold a token, so requests are not logged; a header cannot change the client;
    and no socket is upgraded.

    Args:
        app: The application.
        rules: What it is guarded with.
        options: Further ones of uvicorn's.
    """
    settings: dict[str, Any] = {
        "log_level": "warning",
        "access_log": False,
        "log_config": None,  # its records go where all others go, and lose their secrets there
        "lifespan": "off",
        "http": partial(Connection, rules),
        "ws": "none",
        "proxy_headers": False,
        "server_header": False,
    }
    return uvicorn.Config(app, **(settings | options))


class _Beside(uvicorn.Server):
    """Serves beside other work, to which signals belong."""

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
    """Serve for as long as the context lasts, on the loop that runs; `options` are further ones of uvicorn's."""
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
        await running
