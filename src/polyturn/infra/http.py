"""JsonClient: the HTTP client of polyturn, for requests and answers in JSON.

    client = JsonClient(headers=bearer(token), timeout_s=30)
    reply = await client.send("POST", "http://127.0.0.1:8000/retrieve", {"queries": […]})
    reply.status, reply.json(), reply.excerpt()
    await client.close()

Answers are read up to a limit on the decompressed bytes, because a broken or hostile service may send any number. Redirects
are not followed (their target was never configured), and errors show no secret. A client may be used in several event loops,
one after another; `send_now` is for synchronous code.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyturn.core.errors import PolyturnError, one_line
from polyturn.core.secrets import hide, is_secret_name, secrets_in_query
from polyturn.infra.aio import in_own_loop

if TYPE_CHECKING:
    import aiohttp

KEEP_ALIVE_S = 3.0
"""Seconds to keep an idle connection. Servers close theirs after 5 s; a shorter time avoids using one that is closing."""
MAX_RETRY_AFTER_S = 60.0
MAX_ANSWER_BYTES = 64 << 20


class LargeAnswerError(PolyturnError, ValueError):
    """An answer exceeded its limit; close the connection that it was read from."""


class BrokenOffError(ConnectionError):
    """The connection ended before the answer was complete; the server may still process the request."""


class NotReachedError(BrokenOffError):
    """No connection could be made, so nothing was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReply:
    """The answer of a server."""

    status: int
    content: bytes
    headers: Mapping[str, str]
    secrets: tuple[str, ...] = ()
    """Texts that `excerpt` hides."""

    @property
    def content_type(self) -> str:
        """The content type; empty if the server sent none."""
        return self.headers.get("content-type", "")

    @property
    def retry_after_s(self) -> float | None:
        """Seconds in the Retry-After header, at most `MAX_RETRY_AFTER_S`; None without a number there."""
        try:
            return min(MAX_RETRY_AFTER_S, max(0.0, float(self.headers["retry-after"])))
        except (KeyError, ValueError):
            return None

    def json(self) -> Any:
        """Parse the content as JSON.

        Raises:
            ValueError: the content is not JSON, or is nested too deeply.
        """
        try:
            return json.loads(self.content)
        except RecursionError as problem:
            raise ValueError("it is nested too deeply") from problem

    def excerpt(self, limit: int = 500) -> str:
        """Return the first `limit` characters of the content without secrets, for messages."""
        return hide(self.content[: 4 * limit + 4096].decode("utf-8", "replace"), *self.secrets)[:limit]


class JsonClient:
    """Connections to servers, opened by the first request."""

    def __init__(
        self,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = 60.0,
        max_connections: int = 0,
        uses_proxy: bool = False,
    ) -> None:
        """Configure the client; connections are opened later.

        Args:
            headers: Sent with every request; values of headers with a secret's name are hidden in messages.
            timeout_s: The default deadline of a request, in seconds; None means no deadline.
            max_connections: The most connections at once; 0 means no limit.
            uses_proxy: Whether to use the proxy in the environment's variables, for services outside the cluster.
        """
        self._headers = dict(headers or {})
        self._secrets = tuple(v.removeprefix("Bearer ") for k, v in self._headers.items() if is_secret_name(k))
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._uses_proxy = uses_proxy
        self._session: tuple[asyncio.AbstractEventLoop, aiohttp.ClientSession] | None = None

    async def send(
        self, method: str, url: str, body: Any = None, *, timeout_s: float | None = None, max_bytes: int | None = None
    ) -> HttpReply:
        """Send one request and return the reply, whatever its status.

        Args:
            method: GET, POST and such.
            url: The address.
            body: Sent as JSON; bytes must be JSON already and are sent unchanged.
            timeout_s: The deadline of the whole exchange, in seconds.
            max_bytes: The most bytes of the answer.

        Raises:
            NotReachedError: nothing was sent.
            BrokenOffError: the connection ended before the answer was complete.
            TimeoutError: the deadline passed.
            LargeAnswerError: the answer is too large.
        """
        import aiohttp

        # A server may quote the requested path, and its answer may be shown to the model.
        secrets = (*self._secrets, *secrets_in_query(url))
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = None if data is None else {"content-type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=timeout_s or self._timeout_s)
        request = self._opened().request(method, url, data=data, headers=headers, timeout=timeout, allow_redirects=False)
        try:
            async with request as reply:
                try:
                    content = await whole(reply.content.iter_any(), limit=max_bytes)
                except LargeAnswerError as problem:
                    raise LargeAnswerError(f"HTTP {reply.status}: {problem}") from problem
                kept = {name.lower(): value for name, value in reply.headers.items()}
                return HttpReply(status=reply.status, content=content, headers=kept, secrets=secrets)
        except aiohttp.ClientConnectorError as problem:
            raise NotReachedError(hide(one_line(problem), *secrets)) from problem
        except TimeoutError:
            raise
        except (aiohttp.ClientError, ConnectionError) as problem:
            raise BrokenOffError(hide(one_line(problem), *secrets)) from problem

    async def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        if self._session is not None:
            (loop, session), self._session = self._session, None
            if loop is asyncio.get_running_loop():
                await session.close()

    def _opened(self) -> aiohttp.ClientSession:
        import aiohttp

        loop = asyncio.get_running_loop()
        if self._session is None or self._session[0] is not loop:
            connector = aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=KEEP_ALIVE_S)
            self._session = (
                loop,
                aiohttp.ClientSession(connector=connector, headers=self._headers, trust_env=self._uses_proxy),
            )
        return self._session[1]


async def whole(chunks: AsyncIterable[bytes], *, limit: int | None = None) -> bytes:
    """Return all of `chunks`, joined.

    Raises:
        LargeAnswerError: there are more than `limit` bytes (default: `MAX_ANSWER_BYTES`); reading stops there.
    """
    body, limit = bytearray(), MAX_ANSWER_BYTES if limit is None else limit
    async for chunk in chunks:
        if len(body) + len(chunk) > limit:
            raise LargeAnswerError(f"the answer is larger than {limit} bytes")
        body += chunk
    return bytes(body)


def send_now(method: str, url: str, body: Any = None, *, headers: Mapping[str, str], timeout_s: float) -> HttpReply:
    """Send one request from synchronous code; raises like `JsonClient.send`."""

    async def ask() -> HttpReply:
        client = JsonClient(headers=headers, timeout_s=timeout_s, uses_proxy=True)
        try:
            return await client.send(method, url, body)
        finally:
            await client.close()

    reply: HttpReply = in_own_loop(ask)
    return reply
