"""The demands of our servers on a request before any work is done for it, in one place and without HTTP's machinery.

    ServerRules(token=…, …)  ->  RequestPolicy(rules).refusal(method, path, headers, address)  ->  None, or why not

    Host is another name than this machine's, on a loopback address    421     (a site that lets its name mean 127.0.0.1)
    a web page of another origin asks                                  403     (a site that posts to 127.0.0.1)
    the body is announced as too large, or is compressed               413, 415
    no token, or another                                               401
    the client asks too often, or too many requests are answered       429, 503, with Retry-After

Separate from the framework so that the rules can be read, and tested, alone: `guard.py` puts them in front of
applications, and `connection.py` has those for what is no request yet.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from polyturn.core.errors import ConfigError

MAX_BODY_BYTES = 64 << 20
MAX_CLIENTS = 10_000
"""Clients whose rate is remembered; the one that was silent longest is forgotten first."""
LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain"})
_RATE = re.compile(r"(?P<count>\d+(?:\.\d+)?)(?:/(?P<unit>s|min|h))?(?::(?P<burst>\d+))?")
_UNITS = {None: 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRateLimit:
    """The rate at which one client may ask: a bucket of `burst` requests that fills at `per_s` a second."""

    per_s: float
    burst: float

    @classmethod
    def parse(cls, text: str) -> ClientRateLimit:
        """Return the limit that a text means: "20", "20/s", "600/min", "600/min:50" (a burst of 50).

        Without a burst, it is what two seconds bring, and at least one request.

        Raises:
            ConfigError: the text is none of these.
        """
        match = _RATE.fullmatch(text.strip())
        count = 0.0 if match is None else float(match["count"])
        if match is None or count <= 0 or match["burst"] == "0":
            raise ConfigError(
                f"the rate limit is {text!r:.80}; write requests and a unit: 20/s, 600/min, 600/min:50, 1000/h"
            )
        per_s = count / _UNITS[match["unit"]]
        return cls(per_s=per_s, burst=float(match["burst"] or max(1.0, 2 * per_s)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRules:
    """The demands of one server."""

    token: str | None = field(default=None, repr=False)
    """Demanded of every request but those of `open_paths`; None lets everyone ask who reaches the address."""
    is_loopback: bool = True
    """Whether the server listens where only this machine reaches it; then `Host` must name this machine."""
    allowed_hosts: frozenset[str] = frozenset()
    """Further names, without port, under which it is reached: `Host` on a loopback address, and the origin of a page."""
    for_browsers: bool = False
    """Whether it serves pages: then its own pages may ask, and a cookie counts as a token. Else no page may."""
    cookie: str = ""
    """The cookie that holds the token, of a server with pages; each server has its own."""
    open_paths: frozenset[str] = frozenset()
    """Paths that need no token: whether the server is alive, and nothing else."""
    max_body_bytes: int = MAX_BODY_BYTES
    body_limits: Mapping[str, int] = field(default_factory=dict)
    """Path -> another bound than `max_body_bytes`."""
    rate: ClientRateLimit | None = None
    max_requests: int = 4096
    """Requests that are answered at one moment; more are told to come again."""
    max_connections: int = 1024
    """Connections that are open at one moment; more are closed."""
    head_s: float = 20.0
    """Seconds in which a connection sends the head of a request, from its first moment on, or is closed."""
    body_s: float = 60.0
    """Seconds in which a request's body is here, plus a second for each 64 KiB of it."""


class Refusal(NamedTuple):
    """Why a request is not answered."""

    status: int
    message: str
    headers: Mapping[str, str] = {}


class RequestPolicy:
    """Looks at the head of every request; counts what each client asks and what is being answered."""

    def __init__(self, rules: ServerRules, *, clock: Callable[[], float] = time.monotonic) -> None:
        check_token(rules.token)
        self.rules = rules
        self.num_requests = 0
        """Requests that are being answered."""
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._digest = None if rules.token is None else _digest(rules.token)

    def refusal(self, method: str, path: str, headers: Mapping[str, str], address: str) -> Refusal | None:
        """Return why a request is refused, None if it may be answered.

        Args:
            method: GET, POST, …
            path: Without the query.
            headers: By lower-case name.
            address: Of the client.
        """
        refused = self._is_of_this_machine(headers) or self._is_of_no_page(method, headers) or self._body(path, headers)
        if refused is not None:
            return refused
        is_known = self._digest is None or path in self.rules.open_paths or self.knows(headers)
        wait_s = self.take(address if is_known else f"unknown {address}")  # strangers take nothing from those who are not
        if wait_s > 0:
            seconds = str(math.ceil(wait_s))
            return Refusal(429, f"too many requests; ask again in {seconds} s", {"Retry-After": seconds})
        return None if is_known else Refusal(401, self.how_to_ask(), {"WWW-Authenticate": "Bearer"})

    def knows(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request holds the token: in a header, or in the cookie of a server with pages."""
        return any(self.is_token(token) for token in given_tokens(headers, cookie=self.rules.cookie))

    def is_token(self, token: str) -> bool:
        """Return whether this is the token, in a time that tells nothing about it."""
        return self._digest is not None and hmac.compare_digest(_digest(token), self._digest)

    def how_to_ask(self) -> str:
        """Return the sentence for a request without the token."""
        if self.rules.for_browsers:
            return "this page demands its token; open the link that it printed at its start"
        return "this server demands its token: Authorization: Bearer TOKEN"

    def take(self, client: str) -> float:
        """Count one request of a client; return 0, or the seconds until it may ask again."""
        rate = self.rules.rate
        if rate is None:
            return 0.0
        client, now = client_of(client), self._clock()
        tokens, since = self._buckets.pop(client, (rate.burst, now))
        tokens = min(rate.burst, tokens + (now - since) * rate.per_s)
        is_free = tokens >= 1.0
        self._buckets[client] = (tokens - is_free, now)
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return 0.0 if is_free else (1.0 - tokens) / rate.per_s

    @contextmanager
    def place(self) -> Iterator[Refusal | None]:
        """Hold one of the places of requests that are being answered; gives a refusal where none is free."""
        if self.num_requests >= self.rules.max_requests:
            yield Refusal(503, "too many requests are being answered; ask again later", {"Retry-After": "1"})
            return
        self.num_requests += 1
        try:
            yield None
        finally:
            self.num_requests -= 1

    def max_body(self, path: str) -> int:
        """Return the largest body that this path accepts, in bytes."""
        return self.rules.body_limits.get(path, self.rules.max_body_bytes)

    # The single rules.

    def _is_of_this_machine(self, headers: Mapping[str, str]) -> Refusal | None:
        if not self.rules.is_loopback or self._is_own(headers.get("host", "")):
            return None
        return Refusal(
            421,
            f"this server answers for this machine only, not for the host {headers.get('host', '')!r:.100}; "
            "let it answer for another name with --allow-host",
        )

    def _is_own(self, authority: str) -> bool:
        host = _host_of(authority)
        if host in LOOPBACK_NAMES or host in self.rules.allowed_hosts:
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    def _is_of_no_page(self, method: str, headers: Mapping[str, str]) -> Refusal | None:
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
        if origin is None and site in ("none", "same-origin"):
            return None
        if origin is not None and _host_of(urlsplit_or_empty(origin)) in self.rules.allowed_hosts:
            return None
        if not self.rules.for_browsers:
            return Refusal(403, "this server is not for web pages")
        if origin is not None and urlsplit_or_empty(origin).lower() != headers.get("host", "").lower():
            return Refusal(403, f"a page of {origin!r:.100} may not ask this server")
        is_visit = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
        if origin is None and not is_visit:
            return Refusal(403, "a page of another site may not ask this server")
        return None

    def _body(self, path: str, headers: Mapping[str, str]) -> Refusal | None:
        if headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
            return Refusal(415, "bodies are not compressed here; leave Content-Encoding out")
        if "transfer-encoding" in headers and "content-length" in headers:
            return Refusal(400, "the request has Content-Length and Transfer-Encoding; a body has one length, so send one")
        length = headers.get("content-length", "0").strip()
        if not (length.isascii() and length.isdigit()) or len(length) > 18:
            return Refusal(400, f"Content-Length is {length!r:.40}; it is a whole number")
        if int(length) > self.max_body(path):
            return Refusal(413, f"the body is larger than {self.max_body(path)} bytes")
        return None


def given_tokens(headers: Mapping[str, str], *, cookie: str = "") -> Iterator[str]:
    """Yield what a request holds as a token: `Authorization: Bearer`, `x-api-key`, and a cookie of this name."""
    scheme, _, value = headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        yield value.strip()
    if headers.get("x-api-key"):
        yield headers["x-api-key"].strip()
    if cookie:
        for part in headers.get("cookie", "").split(";"):
            name, _, value = part.strip().partition("=")
            if name == cookie and value:
                yield value


def query_token(query: str) -> str | None:
    """Return `token` of a query, with which a browser opens a page for the first time."""
    try:
        return next(iter(parse_qs(query, max_num_fields=20).get("token", [])), None)
    except ValueError:
        return None


def check_token(token: str | None) -> None:
    """Refuse a token that no header can carry.

    Raises:
        ConfigError: it is empty, or holds blanks or letters beyond ASCII.
    """
    if token is None:
        return
    if not token.strip():
        raise ConfigError("the token is empty; give one that cannot be guessed")
    if not token.isascii() or not token.isprintable() or token != token.strip():
        raise ConfigError("the token holds characters that a header cannot carry; use ASCII letters, digits and signs")


def urlsplit_or_empty(origin: str) -> str:
    """Return the authority of an origin, "" for null and what is none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _host_of(authority: str) -> str:
    """Return the host of HOST, HOST:PORT or [V6]:PORT."""
    authority = authority.strip().lower()
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0].rstrip(".")


def client_of(name: str) -> str:
    """Return who a rate belongs to; of an IPv6 address its first half, which one customer has."""
    head, _, address = name.rpartition(" ")
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return name
    half = str(ipaddress.ip_network((int(ip) >> 64 << 64, 64))) if ip.version == 6 else address
    return f"{head} {half}"


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
