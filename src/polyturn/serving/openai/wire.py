"""JSON in and out of the endpoint: orjson where it is installed, a millisecond quicker for a long history."""

from __future__ import annotations

import json
from typing import Any

try:
    import orjson
except ModuleNotFoundError:  # it comes with polyturn[engines]
    orjson = None  # type: ignore[assignment]


def loads(body: bytes) -> Any:
    """Return what a body says.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return json.loads(body) if orjson is None else orjson.loads(body)
    except RecursionError as problem:
        raise ValueError("it is nested too deeply") from problem


def dumps(value: Any) -> bytes:
    """Return a value as JSON."""
    return json.dumps(value, separators=(",", ":")).encode() if orjson is None else orjson.dumps(value)
