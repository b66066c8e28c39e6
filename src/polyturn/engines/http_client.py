"""HttpClient: JSON over HTTP to one server, with every failure sorted by what may be done about it.

    answered 200                            the JSON
    answered 4xx                            EngineError: the request cannot work there, nor anywhere else
    answered 429, 503                       EngineBusyError: it was not taken, and may be sent again
    answered 5xx, broke off, too late       EngineLostError: it may be asked of another server
    nothing was sent (connection refused)   tried again a few times here, then EngineLostError

Nothing else is sent twice: a request whose answer did not come may still be at work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polyturn.core.errors import EngineBusyError, EngineError, EngineLostError, one_line
from polyturn.core.secret import hide, is_secret_name

if TYPE_CHECKING:
    import aiohttp

_CONNECT_TRIES = 4
_FIRST_PAUSE_S = 0.05
_KEEP_ALIVE_S = 3.0
"""Less than the servers keep an idle connection (5 s), so that none is used in the moment in which they close it."""
_SHOWN = 500
"""Characters of a server's complaint that an error shows."""


class HttpClient:
    """The connections to one server."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None, timeout_s: float = 60.0) -> None:
        """Make it; nothing is opened before the first call.

        Args:
            url: Where the server listens. It may be changed when the server moves.
            headers: Sent with every request.
            timeout_s: The deadline of a call that names none.
        """
        self.url = url.rstrip("/")
        self._headers = dict(headers or {})
        self._secrets = tuple(v.removeprefix("Bearer ") for k, v in self._headers.items() if is_secret_name(k))
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None) -> Any:
        """POST JSON and return the JSON that comes back; numpy arrays are sent as lists.

        Raises:
            EngineLostError: no answer came, or the server failed.
            EngineError: the server refused.
        """
        import orjson

        return await self._call("POST", path, orjson.dumps(body or {}, option=orjson.OPT_SERIALIZE_NUMPY), timeout_s)

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """GET JSON; raises as `post` does."""
        return await self._call("GET", path, None, timeout_s)

    async def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _call(self, method: str, path: str, data: bytes | None, timeout_s: float | None) -> Any:
        import aiohttp

        limit = self._timeout_s if timeout_s is None else timeout_s
        timeout = aiohttp.ClientTimeout(total=limit)
        pause = _FIRST_PAUSE_S
        for attempt in range(_CONNECT_TRIES):
            try:
                return await self._once(method, path, data, timeout)
            except aiohttp.ClientConnectorError as problem:  # nothing was sent
                if attempt == _CONNECT_TRIES - 1:
                    raise EngineLostError(f"{self.url} cannot be reached ({one_line(problem)})") from problem
                await asyncio.sleep(pause)
                pause *= 2
            except TimeoutError as problem:
                raise EngineLostError(f"{self.url}{path} did not answer within {limit:.0f} s") from problem
            except (aiohttp.ClientError, ConnectionError, ValueError) as problem:
                raise EngineLostError(f"{self.url}{path} broke off ({one_line(problem)})") from problem
        raise AssertionError("unreachable: every attempt returns or raises")

    async def _once(self, method: str, path: str, data: bytes | None, timeout: aiohttp.ClientTimeout) -> Any:
        import orjson

        headers = {"content-type": "application/json"}
        request = self._connect().request(
            method, self.url + path, data=data, headers=headers, timeout=timeout, allow_redirects=False
        )
        async with request as reply:
            content = await reply.read()
            if reply.status == 200:
                return orjson.loads(content) if content and "json" in reply.content_type else None
            said = hide(content[: 4 * _SHOWN].decode("utf-8", "replace"), *self._secrets)[:_SHOWN]
            message = f"{self.url}{path} answered {reply.status}: {said}"
            if reply.status in {429, 503}:
                raise EngineBusyError(message)
            raise EngineLostError(message) if reply.status >= 500 else EngineError(message)

    def _connect(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session
