"""JSON from a network: the shape that the rest of the code relies on is checked once, here.

No NaN and no infinity, no number beyond what JSON readers agree on, no text that is not Unicode, and nothing nested deeper
than `MAX_DEPTH`, so that nothing behind it can be led into a recursion without end. orjson reads and writes where it is
installed, a millisecond quicker for a long history; what it lets through, the other lets through too.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

from polyturn.core.errors import one_line
from polyturn.core.nesting import MAX_DEPTH, excess

try:
    import orjson
except ModuleNotFoundError:  # it comes with polyturn[engines]
    orjson = None  # type: ignore[assignment]

LONG_BODY = 1 << 16
"""Bytes from which on a body is read in a thread."""
MAX_VALUES = 1 << 20
"""Lists and objects in one body; a batch of a thousand conversations has some hundred thousand."""


class BodyError(ValueError):
    """A body that is not JSON, or that exceeds the bounds on JSON; its text is a sentence for the client."""


def loads(body: bytes, *, max_values: int = MAX_VALUES) -> Any:
    """Parse a body, which may hold `max_values` lists and objects.

    Raises:
        BodyError: it is no JSON, nested too deeply, or of too many parts.
    """
    try:
        value = _strict(body) if orjson is None else orjson.loads(body)
    except RecursionError as problem:
        raise BodyError(f"the body is not JSON that is read here: it is nested deeper than {MAX_DEPTH}") from problem
    except ValueError as problem:
        raise BodyError(f"the body is not JSON: {one_line(problem):.300}") from problem
    if why := excess(value, max_count=max_values):
        raise BodyError(f"the body is not JSON that is read here: {why}")
    return value


def loads_object(body: bytes, *, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """Return a body that is an object.

    Raises:
        BodyError: it is another value, or no JSON.
    """
    value = loads(body, max_values=max_values)
    if not isinstance(value, dict):
        raise BodyError(f"the body is {type(value).__name__}, not a JSON object")
    return value


async def read_object(body: bytes, *, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """Read a body that is an object; a long one in a thread, so that other requests do not wait for it.

    Raises:
        BodyError: it is another value, or no JSON.
    """
    if len(body) <= LONG_BODY:
        return loads_object(body, max_values=max_values)
    return await asyncio.to_thread(loads_object, body, max_values=max_values)


def dumps(value: Any) -> bytes:
    """Return a value as JSON."""
    return json.dumps(value, separators=(",", ":")).encode() if orjson is None else orjson.dumps(value)


def _strict(body: bytes) -> Any:
    text = body.decode("utf-8")
    value = json.loads(text, parse_constant=_no_constant, parse_float=_finite, parse_int=_short)
    if "\\ud" in text.lower():  # half of a pair, written as an escape
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as problem:
            raise ValueError("a text holds half of a surrogate pair") from problem
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text:.40} is too large")
    return value


def _short(text: str) -> int | float:
    """Return a whole number; one beyond 64 bits as a float, as the other reader does."""
    if len(text) > 400:
        raise ValueError("a number is too large")
    value = int(text)
    return value if -(1 << 63) <= value < 1 << 64 else float(value)
