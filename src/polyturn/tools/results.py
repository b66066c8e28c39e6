"""The observation of a call: a tool's response, cut to size, or one sentence with the reason for a failure.

    Error (unknown_tool): there is no tool 'serach'. Available tools: 'calc', 'search'.

All failures have this form, except failures that a tool reports with a text of its own (`FAILURE`). `EpisodeTools` cuts the
texts to size.
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
from polyturn.tools.truncate import well_formed

FAILURE = "failure"
"""Key in the metrics of a tool that reports a failure with a custom text; the value is one of `REPORTABLE`."""
REPORTABLE = (
    ToolFailure.SCHEMA,
    ToolFailure.TOOL_ERROR,
    ToolFailure.EXCEPTION,
    ToolFailure.TOO_LARGE,
    ToolFailure.TIMEOUT,
    ToolFailure.CONNECTION,
)
"""Kinds of failures that a tool itself may report; the other kinds are for calls that never reached a tool."""
UNAVAILABLE = "unavailable"
"""Short form of `FAILURE`: True stands for the kind `connection`."""
WAITED_S = "waited_s"
"""Key in `ToolResult.metrics` of a tool with a concurrency limit: seconds that the call waited for a slot."""
CUT_CHARS = "cut_chars"
"""Key in `ToolResult.metrics` of a result that was cut: how many characters are left out."""


def error_text(kind: ToolFailure, reason: str) -> str:
    """Return the observation of a failed call."""
    return f"Error ({kind}): {reason}"


def reported_failure(metrics: Mapping[str, Any]) -> str | None:
    """Return the kind of failure that a tool reports in its metrics; None if it does not report one."""
    failure = metrics.get(FAILURE)
    if isinstance(failure, str) and failure in [kind.value for kind in REPORTABLE]:
        return failure
    return ToolFailure.CONNECTION.value if metrics.get(UNAVAILABLE) is True else None


def call_metrics(result: ToolResult) -> Metrics:
    """Return a call's metrics: tool/<name>/calls, errors (a share), error_<kind> (a count), time_s, and the tool's metrics.

    A call with an invented or missing tool name counts as `unknown`, so that the model cannot create metrics. A tool's
    metric `calls`, `errors` or `time_s` is renamed to `own_calls` and so on.
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


def content_of(response: ToolResponse, *, text: str | None = None) -> str | tuple[Mapping[str, Any], ...]:
    """Convert a response to the content of a tool message: text, or images, videos and then text as parts.

    Args:
        response: The response.
        text: Its text after a cut; None takes the whole text.

    Raises:
        DataError: an image or video cannot be read.
    """
    text = well_formed(response.text or "") if text is None else text
    parts: list[Mapping[str, Any]] = [{"type": "image", "image": _medium_of("image", item)} for item in response.image or ()]
    parts += [{"type": "video", "video": _medium_of("video", item)} for item in response.video or ()]
    if not parts:
        return text
    return (*parts, {"type": "text", "text": text}) if text else tuple(parts)


def _medium_of(kind: str, item: Any) -> Any:
    """Return an image or video with its content embedded, because the tool's file may be gone when the record is read."""
    source = to_source(kind, item)
    if not isinstance(source, str):
        return source
    whole = source if source.startswith("data:") else to_source(kind, read_source(source))
    if kind == "image" and isinstance(item, str | bytes | bytearray | Mapping):
        load_image(str(whole))
    return whole


def available(names: Sequence[str]) -> str:
    """Return the sentence that lists the available tools, for the message about an unknown tool."""
    return f"Available tools: {', '.join(map(repr, names))}." if names else "No tools are available."
