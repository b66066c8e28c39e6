"""From a row back to its trajectory, equal to the one that was recorded, bit for bit.

    spans [(segment, length, has_logprobs, …)] cut the joined ids, logprobs and weights into spans, these into segments
    messages, tool_calls and tool_results find each other by turn and by the number of the message

Reads what `to_rows.py` wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from polyturn.core.arrays import Floats
from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.media import Media
from polyturn.core.messages import Message, Origin, ToolCall
from polyturn.core.reward import Reward
from polyturn.core.task import Task
from polyturn.core.trajectory import Branch, Segment, Span, SpanRef, SpanSource, ToolResult, Trajectory, Turn
from polyturn.store.codec import read_as, read_floats, read_json, restore, restore_all
from polyturn.store.schema import StoredTrajectory, Trained


def from_row(row: Mapping[str, Any]) -> StoredTrajectory:
    """Return the trajectory of one row, as `pa.Table.to_pylist` gives it, arrays as lists or as NumPy arrays."""
    segments = _segments(row)
    places = [SpanRef(i, k) for i, segment in enumerate(segments) for k in range(len(segment.spans))]
    messages = _messages(row)
    results: dict[int, list[ToolResult]] = {}
    for r in map(restore_all, row["tool_results"]):
        results.setdefault(r["turn"], []).append(
            ToolResult(
                call_id=r["call_id"],
                name=r["name"],
                content=_content(r),
                reward=r["reward"],
                metrics=read_json(r["metrics"]),
                error=r["error"],
                duration_s=r["duration_s"],
            )
        )
    turns = tuple(
        Turn(
            index=turn["index"],
            message=messages[place][0],
            finish_reason=FinishReason(turn["finish_reason"]),
            spans=tuple(places[i] for i in turn["spans"]),
            tool_results=tuple(results.get(place, ())),
            observation=tuple(messages[place][1:]),
            scores=read_floats(turn["scores"]),
            info=read_json(turn["info"]),
            timings=read_floats(turn["timings"]),
            is_continued=turn["is_continued"],
        )
        for place, turn in enumerate(row["turns"])
    )
    task = read_as(Task, row["task"])
    reward = row["reward"]
    trajectory = Trajectory(
        id=row["id"],
        task=task,
        segments=segments,
        turns=turns,
        stop_reason=StopReason(row["stop_reason"]),
        reward=None
        if reward is None
        else Reward(total=reward, components=dict(row["components"]), info=read_json(row["reward_info"])),
        error=restore(row["error"]),
        metrics=read_floats(row["metrics"]),
    )
    trained = Trained(
        advantages=_floats(row["advantages"]),
        policy_logprobs=_floats(row["policy_logprobs"]),
        weights=_floats(row["trained_weights"]),
        dropped=row["dropped"],
    )
    return StoredTrajectory(trajectory=trajectory, group=row["group"], step=row["step"], split=row["split"], trained=trained)


def _segments(row: Mapping[str, Any]) -> tuple[Segment, ...]:
    ids, logprobs, weights = (np.asarray(row[name]) for name in ("ids", "logprobs", "weights"))
    spans: list[list[Span]] = [[] for _ in row["segments"]]
    at = {"ids": 0, "logprobs": 0, "weights": 0}

    def take(name: str, array: Any, length: int) -> Any:
        at[name] += length
        return array[at[name] - length : at[name]]

    for span in row["spans"]:
        length = span["length"]
        spans[span["segment"]].append(
            Span(
                ids=take("ids", ids, length),
                source=SpanSource(span["source"]),
                turn=span["turn"],
                logprobs=take("logprobs", logprobs, length) if span["has_logprobs"] else None,
                policy_version=span["policy_version"],
                weights=take("weights", weights, length) if span["has_weights"] else None,
            )
        )
    media: list[list[Media]] = [[] for _ in row["segments"]]
    for medium in row["media"]:
        source = read_json(medium["source"])
        media[medium["segment"]].append(
            Media(kind=medium["kind"], source=tuple(source) if isinstance(source, list) else source)
        )
    return tuple(
        Segment(
            spans=tuple(spans[i]),
            media=tuple(media[i]),
            agent=segment["agent"],
            parent=None
            if segment["parent_segment"] is None
            else Branch(segment["parent_segment"], segment["parent_length"]),
        )
        for i, segment in enumerate(row["segments"])
    )


def _messages(row: Mapping[str, Any]) -> dict[int, list[Message]]:
    """Return the messages of each turn: the model's, then what the environment answered."""
    calls: dict[int, list[ToolCall]] = {}
    for c in map(restore_all, row["tool_calls"]):
        call = ToolCall(id=c["id"], name=c["name"], arguments=read_json(c["arguments"]), raw=c["raw"], error=c["error"])
        calls.setdefault(c["message"], []).append(call)
    found: dict[int, list[Message]] = {}
    for number, m in enumerate(map(restore_all, row["messages"])):
        message = Message(
            role=m["role"],
            content=_content(m),
            tool_calls=tuple(calls.get(number, ())),
            tool_call_id=m["tool_call_id"],
            name=m["name"],
            reasoning=m["reasoning"],
            origin=Origin(m["origin"]) if m.get("origin") else None,
        )
        found.setdefault(m["turn"], []).append(message)
    return found


def _content(row: Mapping[str, Any]) -> Any:
    if row["parts"] is None:
        return row["text"]
    return tuple(_parts_of(part) for part in json.loads(row["parts"]))


def _parts_of(part: Any) -> Any:
    return {k: tuple(v) if isinstance(v, list) and k == "video" else v for k, v in part.items()}


def _floats(values: Any) -> Floats | None:
    return None if values is None else np.asarray(values, dtype=np.float32)
