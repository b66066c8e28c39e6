"""Access rules of every server: tokens, host names, request rates and body sizes.

    guarded(app, ServerRules(token="…"))        puts the rules in front of an application (FastAPI, Starlette, the MCP SDK's)
    json_app({"GET /health": health}, rules)    makes an application of functions that return JSON, behind the rules

    a request to a loopback server names another host     421, as in DNS rebinding
    a web page of another origin sends a request          403, for example a site that posts to 127.0.0.1
    the body has two lengths, is compressed or too large  400, 415, 413
    the body arrives too slowly                           408
    the token is missing or wrong                         401
    one client sends too many requests                    429 with Retry-After
    the application fails                                 500, one sentence without a traceback

uvicorn limits the size of heads and the number of connections (`listen.py`). A proxy in front must add TLS and
a deadline for heads (docs/security.md).
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from polyturn.core.errors import ConfigError
from polyturn.serving.body import BoundedBody, Refusal, check_body_headers
from polyturn.serving.rate_limit import ClientRateLimit, ClientRates

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
FormatRefusal = Callable[[str, Refusal], Any]
"""(path, refusal) -> the JSON value of the answer's body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRules:
    """The access rules of one server."""

    token: str | None = field(default=None, repr=False)
    """Required of every request; None admits every client that can reach the address."""
    is_loopback: bool = True
    """Whether the server listens on this machine only; `Host` must then name this machine."""
    allowed_hosts: frozenset[str] = frozenset()
    """Further lower-case names, without port, accepted as `Host` on a loopback address and as the origin of a page."""
    for_browsers: bool = False
    """Whether the server has pages of its own, which may send requests. Pages of other origins never may."""
    cookie: str = ""
    """The name of the cookie that holds the token of a server with pages."""
    open_paths: frozenset[str] = frozenset()
    """Paths that need no token."""
    max_body_bytes: int = MAX_BODY_BYTES
    body_limits: Mapping[str, int] = field(default_factory=dict)
    """Path -> largest body in bytes, where it differs from `max_body_bytes`."""
    rate: ClientRateLimit | None = None
    max_requests: int = 1024
    """Largest number of open connections, and of requests in progress; beyond it uvicorn answers 503."""
    body_s: float = 60.0
    """Seconds within which a body must arrive; each 64 KiB adds one second."""


def _as_detail(path: str, refusal: Refusal) -> Any:
    return {"detail": refusal.message}


def guarded(app: Starlette, rules: ServerRules, *, format_refusal: FormatRefusal = _as_detail) -> None:
    """Add the rules to an application as middleware; middleware added later runs before them."""
    check_token(rules.token)
    app.add_middleware(Guard, rules=rules, format_refusal=format_refusal)


def json_app(
    handlers: Mapping[str, Callable[[Request], Awaitable[Any]]],
    rules: ServerRules,
    *,
    lifespan: Lifespan[Starlette] | None = None,
) -> Starlette:
    """Return an application behind the rules. An HTTPException is answered as {"detail": its sentence}.

    Args:
        handlers: "METHOD /path" -> a function from the request to a JSON value, or to a response.
        rules: Access rules of every request.
        lifespan: A context that is open while the application is served.
    """

    def route(name: str, handler: Callable[[Request], Awaitable[Any]]) -> Route:
        async def answer(request: Request) -> Response:
            value = await handler(request)
            return value if isinstance(value, Response) else JSONResponse(value)

        method, _, path = name.partition(" ")
        return Route(path, answer, methods=[method])

    async def refused(request: Request, problem: Exception) -> Response:
        assert isinstance(problem, HTTPException)
        return JSONResponse({"detail": problem.detail}, problem.status_code, problem.headers)

    routes = [route(name, handler) for name, handler in handlers.items()]
    app = Starlette(routes=routes, exception_handlers={HTTPException: refused}, lifespan=lifespan)
    guarded(app, rules)
    return app


class Guard:
    """ASGI middleware that applies access rules."""

    def __init__(self, app: ASGIApp, rules: ServerRules, format_refusal: FormatRefusal = _as_detail) -> None:
        check_token(rules.token)
        self._app = app
        self._rules = rules
        self._format_refusal = format_refusal
        self._rates = None if rules.rate is None else ClientRates(rules.rate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on with a bounded body."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers: dict[str, str] = {}
        for raw_name, raw_value in scope["headers"]:
            name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        path = scope["path"]
        refusal = self.refusal(scope["method"], path, headers, (scope.get("client") or ("", 0))[0])
        if refusal is not None and refusal.status == 401:
            refusal = self._login(scope) or refusal
        if refusal is not None:
            await self._refuse(send, path, refusal)
            return
        bounded = BoundedBody(receive, send, limit=self._max_body(path), body_s=self._rules.body_s)
        try:
            await self._app(scope, bounded.receive, bounded.send)
        except ClientDisconnect:
            pass
        except Exception as problem:  # its message may quote the request, so only its type leaves this machine
            logger.exception("a request to %s %.80s failed", scope["method"], path)
            bounded.refusal = bounded.refusal or Refusal(500, f"the server failed: {type(problem).__name__}")
        if bounded.refusal is not None and not bounded.has_begun:
            await self._refuse(send, path, bounded.refusal)

    def refusal(self, method: str, path: str, headers: Mapping[str, str], address: str) -> Refusal | None:
        """Return a refusal if a request's head breaks a rule, else None.

        Args:
            method: GET, POST, …
            path: Without the query.
            headers: By lower-case name.
            address: The client's.
        """
        refusal = (
            self._check_host(headers.get("host", ""))
            or self._check_origin(method, headers)
            or check_body_headers(headers, limit=self._max_body(path))
        )
        if refusal is not None:
            return refusal
        rules = self._rules
        is_known = rules.token is None or path in rules.open_paths
        is_known = is_known or any(self._is_token(token) for token in request_tokens(headers, cookie=rules.cookie))
        # Requests without the token are counted separately, so that they do not use up the rate of a client with the token.
        wait_s = 0 if self._rates is None else self._rates.count(address if is_known else f"unknown {address}")
        if wait_s:
            return Refusal(429, f"too many requests; try again in {wait_s} s", {"Retry-After": str(wait_s)})
        if is_known:
            return None
        why = "this server needs its token: Authorization: Bearer TOKEN"
        if rules.for_browsers:
            why = "this page needs its token; open the link that the server printed when it started"
        return Refusal(401, why, {"WWW-Authenticate": "Bearer"})

    def _max_body(self, path: str) -> int:
        return self._rules.body_limits.get(path, self._rules.max_body_bytes)

    def _is_token(self, candidate: str) -> bool:
        token = self._rules.token
        return token is not None and hmac.compare_digest(candidate.encode("utf-8", "surrogateescape"), token.encode())

    def _check_host(self, authority: str) -> Refusal | None:
        name = _hostname(authority)
        if not self._rules.is_loopback or is_loopback(name) or name in self._rules.allowed_hosts:
            return None
        why = f"this server accepts requests for this machine only, not for the host {authority!r:.100}"
        return Refusal(421, f"{why}; allow another name with --allow-host")

    def _check_origin(self, method: str, headers: Mapping[str, str]) -> Refusal | None:
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
        if origin is None and site in ("none", "same-origin"):
            return None
        authority = _authority(origin or "")
        if origin is not None and _hostname(authority) in self._rules.allowed_hosts:
            return None
        if not self._rules.for_browsers:
            return Refusal(403, "this server is not for web pages")
        if origin is None:
            is_allowed = method == "GET" and headers.get("sec-fetch-mode") == "navigate"  # the user followed a link
        else:
            is_allowed = authority == headers.get("host", "").lower()
        return None if is_allowed else Refusal(403, f"a page of {origin or 'another site'!r:.100} may not use this server")

    def _login(self, scope: Scope) -> Refusal | None:
        """Return a redirect that moves the token from a page's address into a cookie, or None."""
        if scope["method"] != "GET" or not self._rules.cookie:
            return None
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        token = query.get("token", [""])[0]
        if not self._is_token(token):
            return None
        cookie = f"{self._rules.cookie}={token}; Path=/; HttpOnly; SameSite=Strict"
        location = "/" + quote(scope["path"].lstrip("/\\"))
        return Refusal(303, "", {"Location": location, "Set-Cookie": cookie, "Cache-Control": "no-store"})

    async def _refuse(self, send: Send, path: str, refusal: Refusal) -> None:
        body = orjson.dumps(self._format_refusal(path, refusal)) if refusal.message else b""
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "X-Content-Type-Options": "nosniff",
            "Connection": "close",
            **refusal.headers,
        }
        encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": refusal.status, "headers": encoded})
        await send({"type": "http.response.body", "body": body})


def request_tokens(headers: Mapping[str, str], *, cookie: str = "") -> Iterator[str]:
    """Yield the tokens of a request: `Authorization: Bearer`, `x-api-key`, and the cookie of this name."""
    scheme, _, value = headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        yield value.strip()
    if headers.get("x-api-key"):
        yield headers["x-api-key"].strip()
    for part in headers.get("cookie", "").split(";") if cookie else ():
        name, _, value = part.strip().partition("=")
        if name == cookie and value:
            yield value


def check_token(token: str | None) -> None:
    """Refuse a token that no header can carry.

    Raises:
        ConfigError: the token is empty, or has blanks at its ends or characters outside printable ASCII.
    """
    if token is None:
        return
    if not token.strip():
        raise ConfigError("the token is empty; use one that cannot be guessed")
    if not token.isascii() or not token.isprintable() or token != token.strip():
        raise ConfigError("the token has characters that a header cannot carry; use ASCII letters, digits and signs")


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is this machine's loopback."""
    try:
        return host in ("localhost", "localhost.localdomain") or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _hostname(authority: str) -> str:
    """Return the lower-case host of "host:port" or "[::1]:port"; empty for two comma-separated values."""
    authority = "" if "," in authority else authority.strip().lower()
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0].rstrip(".")


def _authority(origin: str) -> str:
    """Return the "host:port" of an origin, or an empty string."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
