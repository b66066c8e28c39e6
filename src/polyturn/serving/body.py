"""Request bodies: bounded in size and time, parsed as strict JSON, and validated by a pydantic model.

Strict JSON has no NaN, no infinity and no unpaired surrogates (orjson refuses all three). Nesting is limited to
`MAX_DEPTH`, so later code cannot exhaust the stack.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, NamedTuple, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Send

from polyturn.core.errors import one_line
from polyturn.infra.expected import sentences
from polyturn.infra.nesting import excess

LONG_BODY = 1 << 16
"""Bodies above this many bytes are parsed in a thread."""
MAX_VALUES = 1 << 20
"""Largest number of lists and objects in one body; a batch of a thousand conversations has some hundred thousand."""
_BYTES_PER_S = 64 << 10
"""Bytes that extend a body's deadline by one second."""
T = TypeVar("T")


class Body(BaseModel):
    """A JSON body. A subclass declares the fields that are read; others are ignored."""

    model_config = ConfigDict(frozen=True, strict=True)


B = TypeVar("B", bound=Body)


class Refusal(NamedTuple):
    """The answer to a request that is refused."""

    status: int
    message: str
    headers: Mapping[str, str] = {}


class BodyError(ValueError):
    """A body that is not JSON or exceeds a bound; the message is written for the client."""


def check_body_headers(headers: Mapping[str, str], *, limit: int) -> Refusal | None:
    """Return a refusal if a body's headers break a rule, else None.

    Args:
        headers: By lower-case name.
        limit: The largest body in bytes.
    """
    if headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
        return Refusal(415, "this server does not read compressed bodies; leave Content-Encoding out")
    if "transfer-encoding" in headers and "content-length" in headers:
        return Refusal(400, "the request has Content-Length and Transfer-Encoding; send one of them")
    if headers.get("transfer-encoding", "chunked").strip().lower() != "chunked":
        return Refusal(400, "Transfer-Encoding must be chunked or absent")
    length = headers.get("content-length", "0").strip()
    if not (length.isascii() and length.isdigit()) or len(length) > 18:
        return Refusal(400, f"Content-Length is {length!r:.40}; it must be a whole number")
    return Refusal(413, f"the body is larger than {limit} bytes") if int(length) > limit else None


class BoundedBody:
    """Receive and send of one request, with bounds on its body's size and arrival time.

    If a bound is exceeded, the application sees a disconnected client, its answer is dropped, and `refusal` has the reason.
    """

    def __init__(self, receive: Receive, send: Send, *, limit: int, body_s: float) -> None:
        self._receive = receive
        self._send = send
        self._limit = limit
        self._left_s = body_s
        self._size = 0
        self._is_whole = False
        self.refusal: Refusal | None = None
        self.has_begun = False
        """Whether the answer has begun."""

    async def receive(self) -> Message:
        if self._is_whole:
            return await self._receive()
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            async with asyncio.timeout(self._left_s):
                message = await self._receive()
        except TimeoutError:
            return self._refuse(Refusal(408, "the body did not arrive in time"))
        size = len(message.get("body", b""))
        self._size += size
        self._left_s += size / _BYTES_PER_S - (clock() - start)
        self._is_whole = not message.get("more_body", False)
        if self._size > self._limit:
            return self._refuse(Refusal(413, f"the body is larger than {self._limit} bytes"))
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the answer, unless the body is refused."""
        if self.refusal is None or self.has_begun:
            self.has_begun = True
            await self._send(message)

    def _refuse(self, refusal: Refusal) -> Message:
        self._is_whole = True
        self.refusal = refusal
        return {"type": "http.disconnect"}


def loads(body: bytes, *, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """Parse a body that must be a JSON object with at most `max_values` lists and objects.

    Raises:
        BodyError: the body is not JSON, nested too deeply, has too many parts, or is not an object.
    """
    try:
        value = orjson.loads(body)
    except ValueError as problem:
        raise BodyError(f"the body is not JSON: {one_line(problem):.300}") from problem
    if why := excess(value, max_count=max_values):
        raise BodyError(f"the body exceeds a limit on JSON: {why}")
    if not isinstance(value, dict):
        raise BodyError(f"the body is {type(value).__name__}, not a JSON object")
    return value


async def read_object(body: bytes, *, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """Parse a body like `loads`; a long body in a thread, so that other requests do not wait."""
    if len(body) <= LONG_BODY:
        return loads(body, max_values=max_values)
    return await asyncio.to_thread(loads, body, max_values=max_values)


async def json_object(request: Request) -> dict[str, Any]:
    """Return a request's body, which must be a JSON object.

    Raises:
        HTTPException: 422, the body is not a JSON object.
    """
    try:
        return await read_object(await request.body())
    except BodyError as problem:
        raise HTTPException(422, str(problem)) from problem


async def read_body(request: Request, model: type[B]) -> B:
    """Return a request's body.

    Raises:
        HTTPException: 422, the body is not a JSON object, or a value in it is not valid.
    """
    body = await json_object(request)
    try:
        return model.model_validate(body)
    except ValidationError as problem:
        description = model.model_fields[str(problem.errors()[0]["loc"][0])].description
        hint = "" if description is None else f" ({description})"
        raise HTTPException(422, f"{sentences(problem)[0]}{hint}") from problem


async def while_wanted(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it if the client disconnects. The body must have been read.

    Raises:
        ClientDisconnect: the client disconnected.
    """
    task, has_left = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal has_left
        while (await request.receive())["type"] != "http.disconnect":
            pass
        has_left = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if has_left and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()
