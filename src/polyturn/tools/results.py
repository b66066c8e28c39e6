"""The observation of a call: a tool's response cut to size, or one sentence with the reason of a failure.

    Error (unknown_tool): there is no tool 'serach'. Available tools: 'calc', 'search'.

Separate so that every failure has one form, and so that text is cut in one place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from polyturn.core.media import read_source, to_source
from polyturn.core.metrics import Mean, Metrics, Sum
from polyturn.core.trajectory import ToolResult
from polyturn.tokens.multimodal import load_image
from polyturn.tools.failures import ToolFailure
from polyturn.tools.schema import ToolResponse
from polyturn.tools.truncate import WHOLE, ResultLimit

FAILURE = "failure"
"""In the metrics that a tool returns with a text of its own about a failure: its kind, one of `TOLD`."""
TOLD = (
    ToolFailure.SCHEMA,
    ToolFailure.TOOL_ERROR,
    ToolFailure.EXCEPTION,
    ToolFailure.TOO_LARGE,
    ToolFailure.TIMEOUT,
    ToolFailure.CONNECTION,
)
"""Kinds of failures that a tool itself may tell; the others are of calls that never reached one."""
UNAVAILABLE = "unavailable"
"""The same in short: True stands for `connection`."""
WAITED_S = "waited_s"
"""In `ToolResult.metrics` of a tool with a limit: how long the call waited for its turn."""
CUT_CHARS = "cut_chars"
"""In `ToolResult.metrics` of a result that was cut: how many characters were left out."""


def error_text(kind: ToolFailure, reason: str) -> str:
    """Return the observation of a failed call."""
    return f"Error ({kind}): {reason}"


def told_failure(metrics: Mapping[str, Any]) -> str | None:
    """Return the kind of failure that a tool told in its metrics; None where it told none."""
    failure = metrics.get(FAILURE)
    if isinstance(failure, str) and failure in [kind.value for kind in TOLD]:
        return failure
    return ToolFailure.CONNECTION.value if metrics.get(UNAVAILABLE) is True else None


def call_metrics(result: ToolResult) -> Metrics:
    """Return a call's metrics: tool/<name>/calls, errors (a share), error_<kind> (a count), time_s, and its own.

    A name that the model made up or left out counts as `unknown`, so that the model cannot make up a metric. A tool's own
    `calls`, `errors` or `time_s` becomes `own_calls` and so on.
    """
    is_ours = result.name and result.error != ToolFailure.UNKNOWN_TOOL
    prefix = f"tool/{result.name if is_ours else 'unknown'}"
    counted: Metrics = {
        f"{prefix}/calls": Sum(1),
        f"{prefix}/errors": Mean(float(result.error is not None)),
        f"{prefix}/time_s": Mean(result.duration_s),
    }
    if result.error is not None:
        counted[f"{prefix}/error_{result.error}"] = Sum(1)
    for key, value in result.metrics.items():
        if isinstance(value, bool | int | float) and math.isfinite(value):
            if key == UNAVAILABLE:
                counted[f"{prefix}/unavailable"] = Sum(float(value))
                continue
            name = f"{prefix}/{key}"
            if key == CUT_CHARS:
                counted[f"{prefix}/cut"] = Sum(1)
            counted[f"{prefix}/own_{key}" if name in counted else name] = Mean(float(value))
    return counted


def content_of(response: ToolResponse, *, limit: ResultLimit = WHOLE) -> str | tuple[Mapping[str, Any], ...]:
    """Return a response as the content of a tool message: text, or images, videos and then text as parts.

    Raises:
        DataError: an image or video cannot be read.
    """
    text = limit.cut(response.text or "")
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
