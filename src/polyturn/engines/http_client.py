"""HttpClient: JSON over HTTP to one server, with failures sorted by how a caller may react.

    answered 200                            the JSON
    answered 4xx                            EngineError: the request cannot work on any server
    answered 429, 503                       EngineBusyError: the request was not accepted and may be repeated
    answered 5xx, broke off, too late       EngineLostError: the request may be sent to another server
    nothing was sent (connection refused)   repeated a few times by this class, then EngineLostError

No other request is repeated: one without an answer may still be running.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyturn.core.errors import EngineBusyError, EngineError, EngineLostError, one_line
from polyturn.infra.http import BrokenOffError, HttpReply, JsonClient, LargeAnswerError, NotReachedError
from polyturn.infra.retries import retried

_CONNECT_TRIES = 4
_FIRST_PAUSE_S = 0.05
_MAX_ANSWER_BYTES = 1 << 30
"""Largest size of an answer: expert ids and logprobs of long completions are large, and the server is trusted."""


class HttpClient:
    """The connections to one server."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None, timeout_s: float = 60.0) -> None:
        """Prepare a client; nothing is opened before the first call.

        Args:
            url: The server's address; it may be changed if the server moves.
            headers: Headers of every request.
            timeout_s: Default deadline of a call, in seconds.
        """
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._client = JsonClient(headers=headers, timeout_s=timeout_s)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None) -> Any:
        """POST JSON and return the JSON answer; numpy arrays are sent as lists.

        Raises:
            EngineLostError: no answer came, or the server failed.
            EngineError: the server refused.
        """
        import orjson

        return await self._call("POST", path, orjson.dumps(body or {}, option=orjson.OPT_SERIALIZE_NUMPY), timeout_s)

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """GET JSON; raises as `post` does."""
        return await self._call("GET", path, None, timeout_s)

    async def get_text(self, path: str, *, timeout_s: float | None = None) -> str:
        """GET text; raises as `post` does."""
        return (await self._send("GET", path, None, timeout_s)).content.decode(errors="replace")

    async def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        await self._client.close()

    async def _call(self, method: str, path: str, data: bytes | None, timeout_s: float | None) -> Any:
        import orjson

        reply = await self._send(method, path, data, timeout_s)
        try:
            return orjson.loads(reply.content) if reply.content and "json" in reply.content_type else None
        except ValueError as problem:
            raise EngineLostError(f"{self.url}{path} broke off ({one_line(problem)})") from problem

    async def _send(self, method: str, path: str, data: bytes | None, timeout_s: float | None) -> HttpReply:
        limit = self._timeout_s if timeout_s is None else timeout_s
        try:
            reply = await retried(
                lambda: self._client.send(method, self.url + path, data, timeout_s=limit, max_bytes=_MAX_ANSWER_BYTES),
                again=lambda problem: isinstance(problem, NotReachedError),
                tries=_CONNECT_TRIES,
                wait_s=_FIRST_PAUSE_S,
            )
        except NotReachedError as problem:
            raise EngineLostError(f"{self.url} cannot be reached ({problem})") from problem
        except TimeoutError as problem:
            raise EngineLostError(f"{self.url}{path} did not answer within {limit:g} s") from problem
        except (BrokenOffError, LargeAnswerError) as problem:
            raise EngineLostError(f"{self.url}{path} broke off ({problem})") from problem
        if reply.status == 200:
            return reply
        message = f"{self.url}{path} answered {reply.status}: {reply.excerpt()}"
        if reply.status in {429, 503}:
            raise EngineBusyError(message)
        raise EngineLostError(message) if reply.status >= 500 else EngineError(message)
