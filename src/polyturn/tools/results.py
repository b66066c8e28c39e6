"""What the model reads of a call: a tool's response cut to size, or one sentence about why the call failed.

    Error (unknown_tool): there is no tool 'serach'. Available tools: 'calc', 'search'.

Separate so that every failure has one form, and so that text is cut in one place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from polyturn.core.errors import ConfigError
from polyturn.core.media import read_source, to_source
from polyturn.core.metrics import Mean, Metrics, Sum
from polyturn.core.trajectory import ToolResult
from polyturn.tokens.multimodal import load_image
from polyturn.tools.schema import ToolResponse

TruncateSide = Literal["left", "right", "middle"]

UNKNOWN_TOOL = "unknown_tool"
BAD_JSON = "bad_json"
SCHEMA = "schema"
TIMEOUT = "timeout"
EXCEPTION = "exception"
TOOL_ERROR = "tool_error"
SKIPPED = "skipped"


def error_text(kind: str, reason: str) -> str:
    """Return the observation of a failed call."""
    return f"Error ({kind}): {reason}"


def call_metrics(result: ToolResult) -> Metrics:
    """Return what one call shows: tool/<name>/calls, errors (a share), time_s, and every number that `execute` measured.

    A name that the model made up or left out counts as `unknown`, so that the model cannot make up a metric. A tool's own
    `calls`, `errors` or `time_s` becomes `own_calls` and so on.
    """
    is_ours = result.name and result.error != UNKNOWN_TOOL
    prefix = f"tool/{result.name if is_ours else 'unknown'}"
    counted: Metrics = {
        f"{prefix}/calls": Sum(1),
        f"{prefix}/errors": Mean(float(result.error is not None)),
        f"{prefix}/time_s": Mean(result.duration_s),
    }
    for key, value in result.metrics.items():
        if isinstance(value, bool | int | float) and math.isfinite(value):
            name = f"{prefix}/{key}"
            counted[f"{prefix}/own_{key}" if name in counted else name] = Mean(float(value))
    return counted


def truncate(text: str, *, max_chars: int | None, side: TruncateSide = "middle") -> str:
    """Return `text` with at most `max_chars` of its characters, and a mark where the rest was.

    Args:
        text: The text.
        max_chars: How many characters of it are kept; None keeps all.
        side: What is cut away: "left" keeps the tail, "right" keeps the head, "middle" keeps half of each.
    """
    if max_chars is None or len(text) <= max_chars:
        return text
    if side == "left":
        return "(truncated)..." + text[len(text) - max_chars :]
    if side == "right":
        return text[:max_chars] + "...(truncated)"
    tail = max_chars // 2
    return text[: max_chars - tail] + "...(truncated)..." + text[len(text) - tail :]


def check_side(side: str) -> None:
    """Check the name of a side.

    Raises:
        ConfigError: it is none.
    """
    if side not in ("left", "right", "middle"):
        raise ConfigError(f"truncate_side is {side!r}; use 'left' (keeps the tail), 'right' (keeps the head) or 'middle'")


def content_of(response: ToolResponse, *, max_chars: int | None, side: TruncateSide) -> str | tuple[Mapping[str, Any], ...]:
    """Return a response as the content of a tool message: text, or images, videos and then text as parts.

    Raises:
        DataError: an image or video cannot be read.
    """
    text = truncate(response.text or "", max_chars=max_chars, side=side)
    parts: list[Mapping[str, Any]] = [{"type": "image", "image": _shown("image", item)} for item in response.image or ()]
    parts += [{"type": "video", "video": _shown("video", item)} for item in response.video or ()]
    if not parts:
        return text
    return (*parts, {"type": "text", "text": text}) if text else tuple(parts)


def _shown(kind: str, item: Any) -> Any:
    """Return a medium as a record keeps it: whole, because a tool's file may be gone when it is looked at again."""
    source = to_source(kind, item)
    if not isinstance(source, str):
        return source
    whole = source if source.startswith("data:") else to_source(kind, read_source(source))
    if kind == "image" and isinstance(item, str | bytes | bytearray | Mapping):
        load_image(str(whole))
    return whole


def available(names: Sequence[str]) -> str:
    """Return the end of the message about an unknown tool."""
    return f"Available tools: {', '.join(map(repr, names))}." if names else "No tools are available."
