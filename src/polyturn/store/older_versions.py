"""Converts rows of earlier versions of the store to the JSON of the current one.

    version 1    payload: the whole trajectory, including arrays, as JSON
    version 2    lists of structs: segments, media, spans, messages [(turn, …)], tool_calls [(message, …)], tool_results, …

In version 2 messages, calls and results are related by turn and message number. Texts that cannot be written as UTF-8 are
stored as JSON after `_ESCAPE`, and members without a fixed shape are JSON in a string.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_ESCAPE = "\ue000json:"
_JSON_MEMBERS = ("arguments", "metrics", "scores", "info", "timings")
COLUMNS = (
    "id", "task", "stop_reason", "reward", "components", "reward_info", "error", "metrics", "segments", "media", "spans",
    "messages", "tool_calls", "tool_results", "turns", "routes_shape", "routed_spans",
)  # fmt: skip
"""The columns of version 2 that `of_second` reads."""


def of_second(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trajectory of a row of version 2 as data for `core/serde.py`, without arrays."""
    segments, refs = _segments(row)
    messages = _by_turn(row["messages"])
    calls: dict[int, list[dict[str, Any]]] = {}
    for call in row["tool_calls"]:
        calls.setdefault(call["message"], []).append(_read(call, but=("message", "turn")))
    for number, message in enumerate(m for of in messages.values() for m in of):
        message["tool_calls"] = calls.get(number, [])
    results = _by_turn(row["tool_results"])
    turns = [
        {
            **_read(turn),
            "message": messages[number][0],
            "observation": messages[number][1:],
            "tool_results": results.get(number, []),
            "spans": [refs[i] for i in turn["spans"]],
        }
        for number, turn in enumerate(row["turns"])
    ]
    reward = {"total": row["reward"], "components": dict(row["components"] or ()), "info": _json(row["reward_info"])}
    return {
        "id": row["id"],
        "task": _json(row["task"]),
        "segments": segments,
        "turns": turns,
        "stop_reason": row["stop_reason"],
        "reward": None if row["reward"] is None else reward,
        "error": _text(row["error"]),
        "metrics": _json(row["metrics"]),
    }


def read_floats(text: str | None) -> dict[str, float]:
    """Return the components of a row of version 1."""
    return {k: float(v) if isinstance(v, str) else v for k, v in _json(text).items()}


def _segments(row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
    """Return the segments, and for each span of the row its (segment, index in the segment)."""
    segments: list[dict[str, Any]] = []
    for segment in row["segments"]:
        parent = None if segment["parent_segment"] is None else (segment["parent_segment"], segment["parent_length"])
        segments.append({"spans": [], "media": [], "agent": _text(segment["agent"]), "parent": parent})
    refs = []
    routed = set(row.get("routed_spans") or ())
    for number, span in enumerate(row["spans"]):
        spans = segments[span["segment"]]["spans"]
        refs.append((span["segment"], len(spans)))
        spans.append({**_read(span, but=("segment",)), "routes_shape": row["routes_shape"] if number in routed else None})
    for medium in row["media"]:
        segments[medium["segment"]]["media"].append({"kind": medium["kind"], "source": _json(medium["source"])})
    return segments, refs


def _by_turn(structs: Sequence[Mapping[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Return messages or results by turn, with their text or parts as content."""
    by_turn: dict[int, list[dict[str, Any]]] = {}
    for struct in structs:
        value = _read(struct, but=("turn",))
        text, parts = value.pop("text"), value.pop("parts")
        by_turn.setdefault(struct["turn"], []).append({**value, "content": text if parts is None else _json(parts)})
    return by_turn


def _read(struct: Mapping[str, Any], *, but: Sequence[str] = ()) -> dict[str, Any]:
    """Return a struct with texts and JSON decoded, without the members that only give its position."""
    return {k: _json(v) if k in _JSON_MEMBERS else _text(v) for k, v in struct.items() if k not in but}


def _text(value: Any) -> Any:
    return json.loads(value[len(_ESCAPE) :]) if isinstance(value, str) and value.startswith(_ESCAPE) else value


def _json(text: str | None) -> Any:
    return {} if text is None else json.loads(text)
