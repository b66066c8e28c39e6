"""Normalizes a tool's result to one shape: (response, step reward, metrics).

    "4"  {"answer": 4}  None  ToolResponse(...)  ("4", 0.5)  ("4", None, {"hits": 3})

All of these forms are accepted, from functions and classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from polyturn.core.errors import RewardError
from polyturn.core.reward import MAX_REWARD, as_score, brief
from polyturn.tools.failures import TooLargeError
from polyturn.tools.schema import ToolResponse

MAX_DATA = 8 * 2**20
"""Maximum size of bytes, or of a dict or list as JSON text. A string may be longer, because only its kept part is copied."""
MAX_MEDIUM = 64 * 2**20
"""Maximum size of an image or a video, in bytes or in characters of a data URL."""

_RESPONSE_KEYS = {"text", "image", "video"}


class ToolOutcome(NamedTuple):
    """One answer of a tool."""

    response: ToolResponse
    reward: float | None = None
    metrics: Mapping[str, Any] = {}


def normalize(returned: Any) -> ToolOutcome:
    """Convert the result of `execute` or of a function to a `ToolOutcome`.

    Raises:
        TypeError: the tuple is empty or longer than three, or its metrics are not a mapping.
        RewardError: the step reward is not a finite number.
    """
    parts = returned if isinstance(returned, tuple) else (returned,)
    if not 1 <= len(parts) <= 3:
        raise TypeError(
            f"a tool returned a tuple of {len(parts)}; return one of length 1, 2, or 3: response, (response, reward) or "
            "(response, reward, metrics)"
        )
    response, reward, metrics = (*parts, None, None)[:3]
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f"a tool returned metrics of type {type(metrics).__name__}; return a dict or None")
    return ToolOutcome(to_response(response), None if reward is None else finite(reward, what="step"), dict(metrics or {}))


def to_response(value: Any) -> ToolResponse:
    """Convert an answer of any type to a `ToolResponse`; dicts and lists become JSON.

    Raises:
        TooLargeError: the answer is larger than `MAX_DATA`, nested too deep, or contains itself.
    """
    if isinstance(value, ToolResponse):
        for item in (*(value.image or ()), *(value.video or ())):
            if isinstance(item, str | bytes | bytearray) and len(item) > MAX_MEDIUM:
                raise TooLargeError(
                    f"the answer has an image or video of {len(item):,} bytes; at most {MAX_MEDIUM:,} are read"
                )
        return value
    if value is None:
        return ToolResponse()
    if isinstance(value, Mapping) and (value.keys() & {"image", "video"}) and value.keys() <= _RESPONSE_KEYS:
        media = {k: [v] if k != "text" and v is not None and not isinstance(v, list) else v for k, v in value.items()}
        return to_response(ToolResponse(**media))
    if isinstance(value, Mapping | list):
        try:
            value = json.dumps(value, ensure_ascii=False, default=str)
        except (RecursionError, ValueError) as problem:
            raise TooLargeError(f"the answer cannot be written as JSON ({problem}); ask for a part of it") from problem
        return ToolResponse(text=_of_bounded_size(value))
    return ToolResponse(text=str(_of_bounded_size(value) if isinstance(value, bytes | bytearray) else value))


def _of_bounded_size(value: Any) -> Any:
    if len(value) > MAX_DATA:
        raise TooLargeError(f"the answer has {len(value):,} characters; at most {MAX_DATA:,} are read, so ask for less")
    return value


def finite(value: Any, *, what: str) -> float:
    """Convert a reward to a float.

    Raises:
        RewardError: the value is not a finite number, or exceeds the largest allowed reward.
    """
    number = as_score(value)
    if number is None:
        none = "" if what == "outcome" else ", or None for none"
        raise RewardError(f"the {what} reward is {brief(value)}; return a finite number of at most {MAX_REWARD:g}{none}")
    return number
