"""The columns of a recorded trajectory, and the way there and back.

    one row a trajectory
    choosing   id, group, split, step, reward, components, stop_reason, num_turns, …     plain values
    tokens     spans [(segment, source, turn, length, policy_version, …)]   ids [all]   logprobs [of sampled tokens]
    training   advantages, policy_logprobs [of sampled tokens], trained_weights, dropped
    reading    messages [(turn, role, text, …)]   tool_calls [(turn, name, arguments, …)]   tool_results [(turn, …)]

Arrays are list columns, so that other tools read them without a parser of ours; what has no fixed shape (an interaction's
metadata, a tool's arguments) is JSON in a string. A trajectory comes back equal, bit for bit. Ids of all spans stand in one
list, logprobs and weights only where a span has them: a span says how many.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from polyturn.core.arrays import Floats
from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.media import Media
from polyturn.core.messages import Message, ToolCall
from polyturn.core.reward import Reward
from polyturn.core.serde import from_json, to_json
from polyturn.core.task import Task
from polyturn.core.trajectory import Branch, Segment, Span, SpanRef, SpanSource, ToolResult, Trajectory, Turn

VERSION = "2"
METADATA_KEY = "polyturn_store"

_NUMBERS = pa.map_(pa.string(), pa.float64())
_INDEX: dict[str, pa.DataType] = {
    "id": pa.string(),
    "group": pa.string(),
    "step": pa.int64(),
    "split": pa.string(),
    "task_id": pa.string(),
    "data_source": pa.string(),
    "reward": pa.float64(),
    "components": _NUMBERS,
    "stop_reason": pa.string(),
    "error": pa.string(),
    "dropped": pa.string(),
    "num_turns": pa.int32(),
    "num_segments": pa.int32(),
    "num_tokens": pa.int64(),
    "num_sampled_tokens": pa.int64(),
    "num_trained_tokens": pa.int64(),
    "num_tool_calls": pa.int32(),
    "num_tool_errors": pa.int32(),
    "min_version": pa.int32(),
    "max_version": pa.int32(),
    "generate_s": pa.float64(),
    "tools_s": pa.float64(),
    "interaction_s": pa.float64(),
    "question": pa.string(),
}
"""What a table of trajectories shows and is filtered by."""

_NESTED: dict[str, dict[str, pa.DataType]] = {
    "segments": {"agent": pa.string(), "parent_segment": pa.int32(), "parent_length": pa.int32()},
    "media": {"segment": pa.int32(), "kind": pa.string(), "source": pa.string()},
    "spans": {
        "segment": pa.int32(),
        "source": pa.string(),
        "turn": pa.int32(),
        "length": pa.int32(),
        "policy_version": pa.int32(),
        "has_logprobs": pa.bool_(),
        "has_weights": pa.bool_(),
    },
    "messages": {
        "turn": pa.int32(),
        "role": pa.string(),
        "text": pa.string(),
        "parts": pa.string(),
        "reasoning": pa.string(),
        "name": pa.string(),
        "tool_call_id": pa.string(),
    },
    "tool_calls": {
        "message": pa.int32(),
        "turn": pa.int32(),
        "id": pa.string(),
        "name": pa.string(),
        "arguments": pa.string(),
        "raw": pa.string(),
        "error": pa.string(),
    },
    "tool_results": {
        "turn": pa.int32(),
        "call_id": pa.string(),
        "name": pa.string(),
        "text": pa.string(),
        "parts": pa.string(),
        "reward": pa.float64(),
        "metrics": pa.string(),
        "error": pa.string(),
        "duration_s": pa.float64(),
    },
    "turns": {
        "index": pa.int32(),
        "finish_reason": pa.string(),
        "spans": pa.list_(pa.int32()),
        "scores": pa.string(),
        "info": pa.string(),
        "timings": pa.string(),
        "is_continued": pa.bool_(),
    },
}
_ARRAYS: dict[str, pa.DataType] = {
    "ids": pa.int32(),
    "logprobs": pa.float32(),
    "weights": pa.float32(),
    "advantages": pa.float32(),
    "policy_logprobs": pa.float32(),
    "trained_weights": pa.float32(),
}
_JSON = {"task": pa.string(), "reward_info": pa.string(), "metrics": pa.string()}

SCHEMA = pa.schema(
    {
        **_INDEX,
        **_JSON,
        **{name: pa.list_(pa.struct(fields)) for name, fields in _NESTED.items()},
        **{name: pa.list_(kind) for name, kind in _ARRAYS.items()},
    },
    metadata={METADATA_KEY: VERSION},
)
INDEX_COLUMNS = tuple(_INDEX)
KEY = ("split", "step", "group", "id")
"""What names a record: of two with the same key the later one counts."""
MAX_QUESTION = 200
"""Characters of the task's last message that the table of trajectories shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What training made of one trajectory; every array is over its sampled tokens, in the order of the segments."""

    advantages: Floats | None = None
    policy_logprobs: Floats | None = None
    """The trainer's log-probabilities, beside the engine's in the spans."""
    weights: Floats | None = None
    """The weights that the loss used; None where they are those of the spans."""
    dropped: str | None = None
    """Why the whole trajectory was left out of the loss; None if it was not, or is no part of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTrajectory:
    """A trajectory as it was recorded, with its place in the run and what training made of it."""

    trajectory: Trajectory
    group: str
    step: int
    split: str
    trained: Trained = field(default_factory=Trained)

    def on_tokens(self, segment: int, values: Floats) -> Floats:
        """Put an array of `trained` onto a segment: [T], NaN on tokens that were not sampled."""
        before = sum(int(s.sampled_mask.sum()) for s in self.trajectory.segments[:segment])
        mask = self.trajectory.segments[segment].sampled_mask
        out = np.full(len(mask), np.nan, np.float32)
        out[mask] = values[before : before + int(mask.sum())]
        return out


def to_table(rows: Sequence[StoredTrajectory]) -> pa.Table:
    """Return the rows as a table of `SCHEMA`."""
    columns: dict[str, pa.Array] = {}
    index = [_index_row(row) for row in rows]
    for name, kind in _INDEX.items():
        columns[name] = pa.array([row[name] for row in index], kind)
    trajectories = [row.trajectory for row in rows]
    columns["task"] = _json_column(t.task for t in trajectories)
    columns["reward_info"] = _json_column(None if t.reward is None else t.reward.info for t in trajectories)
    columns["metrics"] = _json_column(t.metrics for t in trajectories)
    nested: dict[str, _Nested] = {name: _Nested(fields) for name, fields in _NESTED.items()}
    for trajectory in trajectories:
        _add_nested(nested, trajectory)
        for one in nested.values():
            one.end_row()
    columns |= {name: one.to_array() for name, one in nested.items()}
    spans = [[s for segment in t.segments for s in segment.spans] for t in trajectories]
    columns["ids"] = _arrays([[s.ids for s in of] for of in spans], np.int32)
    columns["logprobs"] = _arrays([[s.logprobs for s in of if s.logprobs is not None] for of in spans], np.float32)
    columns["weights"] = _arrays([[s.weights for s in of if s.weights is not None] for of in spans], np.float32)
    columns["advantages"] = _optional([row.trained.advantages for row in rows])
    columns["policy_logprobs"] = _optional([row.trained.policy_logprobs for row in rows])
    columns["trained_weights"] = _optional([row.trained.weights for row in rows])
    return pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def from_row(row: Mapping[str, Any]) -> StoredTrajectory:
    """Return the trajectory of one row, as `pa.Table.to_pylist` gives it, arrays as lists or as NumPy arrays."""
    segments = _segments(row)
    places = [SpanRef(i, k) for i, segment in enumerate(segments) for k in range(len(segment.spans))]
    messages = _messages(row)
    results: dict[int, list[ToolResult]] = {}
    for r in map(_unclean_all, row["tool_results"]):
        results.setdefault(r["turn"], []).append(
            ToolResult(
                call_id=r["call_id"],
                name=r["name"],
                content=_content(r),
                reward=r["reward"],
                metrics=_read(r["metrics"]),
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
            scores=_read_floats(turn["scores"]),
            info=_read(turn["info"]),
            timings=_read_floats(turn["timings"]),
            is_continued=turn["is_continued"],
        )
        for place, turn in enumerate(row["turns"])
    )
    task = _read_as(Task, row["task"])
    reward = row["reward"]
    trajectory = Trajectory(
        id=row["id"],
        task=task,
        segments=segments,
        turns=turns,
        stop_reason=StopReason(row["stop_reason"]),
        reward=None
        if reward is None
        else Reward(total=reward, components=dict(row["components"]), info=_read(row["reward_info"])),
        error=_unclean(row["error"]),
        metrics=_read_floats(row["metrics"]),
    )
    trained = Trained(
        advantages=_floats(row["advantages"]),
        policy_logprobs=_floats(row["policy_logprobs"]),
        weights=_floats(row["trained_weights"]),
        dropped=row["dropped"],
    )
    return StoredTrajectory(trajectory=trajectory, group=row["group"], step=row["step"], split=row["split"], trained=trained)


def upgrade(table: pa.Table) -> pa.Table:
    """Return the index columns of a table that an earlier version wrote, with nulls for what it did not record.

    Raises:
        KeyError: it has no column that every version wrote.
    """
    columns = []
    for name, kind in _INDEX.items():
        if name not in table.column_names and name not in KEY:
            columns.append(pa.nulls(table.num_rows, kind))
        elif name == "components" and pa.types.is_string(table[name].type):
            read = [None if v is None else list(_read_floats(v).items()) for v in table[name].to_pylist()]
            columns.append(pa.array(read, kind))
        else:
            columns.append(table[name].cast(kind))
    return pa.table(columns, names=list(_INDEX))


class _Nested:
    """A column of lists of structs, gathered flat."""

    def __init__(self, fields: Mapping[str, pa.DataType]) -> None:
        self._fields = fields
        self._flat: dict[str, list[Any]] = {name: [] for name in fields}
        self._count, self._offsets = 0, [0]

    def add(self, **values: Any) -> None:
        for name, of in self._flat.items():
            of.append(values[name])
        self._count += 1

    def end_row(self) -> None:
        self._offsets.append(self._count)

    def to_array(self) -> pa.Array:
        fields = [pa.field(name, kind) for name, kind in self._fields.items()]
        flat = [pa.array(_storable(self._flat[f.name], f.type), f.type) for f in fields]
        return pa.ListArray.from_arrays(pa.array(self._offsets, pa.int32()), pa.StructArray.from_arrays(flat, fields=fields))


def _add_nested(nested: Mapping[str, _Nested], trajectory: Trajectory) -> None:
    at: dict[tuple[int, int], int] = {}
    for number, segment in enumerate(trajectory.segments):
        parent = segment.parent
        nested["segments"].add(
            agent=segment.agent,
            parent_segment=None if parent is None else parent.segment,
            parent_length=None if parent is None else parent.length,
        )
        for medium in segment.media:
            nested["media"].add(segment=number, kind=medium.kind, source=_json(medium.source))
        for place, span in enumerate(segment.spans):
            at[number, place] = len(at)
            nested["spans"].add(
                segment=number,
                source=span.source.value,
                turn=span.turn,
                length=len(span),
                policy_version=span.policy_version,
                has_logprobs=span.logprobs is not None,
                has_weights=span.weights is not None,
            )
    count = 0
    for message in trajectory.task.prompt:
        count = _add_message(nested, message, turn=-1, number=count)
    for number, turn in enumerate(trajectory.turns):
        for message in (turn.message, *turn.observation):
            count = _add_message(nested, message, turn=number, number=count)
        for result in turn.tool_results:
            text, parts = _split(result.content)
            nested["tool_results"].add(
                turn=number,
                call_id=result.call_id,
                name=result.name,
                text=text,
                parts=parts,
                reward=result.reward,
                metrics=_json(result.metrics),
                error=result.error,
                duration_s=result.duration_s,
            )
        nested["turns"].add(
            index=turn.index,
            finish_reason=turn.finish_reason.value,
            spans=[at[ref.segment, ref.span] for ref in turn.spans],
            scores=_json(turn.scores),
            info=_json(turn.info),
            timings=_json(turn.timings),
            is_continued=turn.is_continued,
        )


def _add_message(nested: Mapping[str, _Nested], message: Message, *, turn: int, number: int) -> int:
    text, parts = _split(message.content)
    nested["messages"].add(
        turn=turn,
        role=message.role,
        text=text,
        parts=parts,
        reasoning=message.reasoning,
        name=message.name,
        tool_call_id=message.tool_call_id,
    )
    for call in message.tool_calls:
        nested["tool_calls"].add(
            message=number,
            turn=turn,
            id=call.id,
            name=call.name,
            arguments=_json(call.arguments),
            raw=call.raw,
            error=call.error,
        )
    return number + 1


def _index_row(row: StoredTrajectory) -> dict[str, Any]:
    trajectory, trained = row.trajectory, row.trained
    reward = trajectory.reward
    spans = [s for segment in trajectory.segments for s in segment.spans]
    versions = [s.policy_version for s in spans if s.policy_version is not None]
    calls = [result for turn in trajectory.turns for result in turn.tool_results]
    prompt = trajectory.task.prompt
    if row.split != "train" or trained.dropped is not None or trajectory.is_failed:
        num_trained = 0
    elif trained.weights is not None:
        num_trained = int(np.count_nonzero(trained.weights))
    else:
        num_trained = sum(int(np.count_nonzero(s.loss_weights)) for s in spans if s.source is SpanSource.SAMPLED)
    return {
        "id": trajectory.id,
        "group": row.group,
        "step": row.step,
        "split": row.split,
        "task_id": trajectory.task.id,
        "data_source": trajectory.task.data_source,
        "reward": None if reward is None else float(reward.total),
        "components": None if reward is None else [(k, float(v)) for k, v in reward.components.items()],
        "stop_reason": trajectory.stop_reason.value,
        "error": None if trajectory.error is None else _clean(trajectory.error),
        "dropped": trained.dropped,
        "num_turns": len(trajectory.turns),
        "num_segments": len(trajectory.segments),
        "num_tokens": sum(len(s) for s in spans),
        "num_sampled_tokens": trajectory.num_sampled_tokens,
        "num_trained_tokens": num_trained,
        "num_tool_calls": len(calls),
        "num_tool_errors": sum(1 for c in calls if c.error is not None),
        "min_version": min(versions, default=None),
        "max_version": max(versions, default=None),
        **{f"{name}_s": sum(t.timings.get(name, 0.0) for t in trajectory.turns) for name in _TIMES},
        "question": _clean(prompt[-1].text[:MAX_QUESTION]) if prompt else "",
    }


_TIMES = ("generate", "tools", "interaction")


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
        source = _read(medium["source"])
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
    for c in map(_unclean_all, row["tool_calls"]):
        call = ToolCall(id=c["id"], name=c["name"], arguments=_read(c["arguments"]), raw=c["raw"], error=c["error"])
        calls.setdefault(c["message"], []).append(call)
    found: dict[int, list[Message]] = {}
    for number, m in enumerate(map(_unclean_all, row["messages"])):
        message = Message(
            role=m["role"],
            content=_content(m),
            tool_calls=tuple(calls.get(number, ())),
            tool_call_id=m["tool_call_id"],
            name=m["name"],
            reasoning=m["reasoning"],
        )
        found.setdefault(m["turn"], []).append(message)
    return found


def _split(content: Any) -> tuple[str | None, str | None]:
    """Return content as text, or as JSON of its parts."""
    return (content, None) if isinstance(content, str) else (None, _json(content))


def _content(row: Mapping[str, Any]) -> Any:
    if row["parts"] is None:
        return row["text"]
    return tuple(_parts_of(part) for part in json.loads(row["parts"]))


def _parts_of(part: Any) -> Any:
    return {k: tuple(v) if isinstance(v, list) and k == "video" else v for k, v in part.items()}


def _json_column(values: Iterable[Any]) -> pa.Array:
    return pa.array([None if v is None else _json(v) for v in values], pa.string())


def _json(value: Any) -> str:
    return json.dumps(to_json(value), separators=(",", ":"))


def _read(text: str | None) -> Any:
    return {} if text is None else json.loads(text)


def _read_as(cls: type[Any], text: str) -> Any:
    return from_json(cls, json.loads(text))


def _read_floats(text: str | None) -> dict[str, float]:
    return {k: float(v) if isinstance(v, str) else v for k, v in _read(text).items()}


_ESCAPE = "\ue000json:"
"""Opens a text that UTF-8 cannot write (a lone surrogate, from a tool that read broken bytes), kept as JSON."""


def _clean(text: str | None) -> str | None:
    """Return a text as Parquet can hold it."""
    if text is None or text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return _ESCAPE + json.dumps(text)
    return _ESCAPE + json.dumps(text) if text.startswith(_ESCAPE) else text


def _unclean(text: str | None) -> Any:
    return json.loads(text[len(_ESCAPE) :]) if text is not None and text.startswith(_ESCAPE) else text


def _unclean_all(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _unclean(value) if isinstance(value, str) else value for name, value in row.items()}


def _storable(values: list[Any], kind: pa.DataType) -> list[Any]:
    return [_clean(v) for v in values] if pa.types.is_string(kind) else values


def _arrays(rows: Sequence[Sequence[Any]], dtype: type[Any]) -> pa.Array:
    """Return a list column, the arrays of each row joined."""
    lengths = [sum(len(a) for a in row) for row in rows]
    flat = [a for row in rows for a in row]
    values = np.concatenate(flat) if flat else np.empty(0, dtype)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values.astype(dtype, copy=False)))


def _optional(rows: Sequence[Floats | None]) -> pa.Array:
    """Return a list column that is null where a row has no array."""
    lengths = [0 if row is None else len(row) for row in rows]
    flat = [row for row in rows if row is not None]
    values = np.concatenate(flat) if flat else np.empty(0, np.float32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    array = pa.array(values.astype(np.float32, copy=False))
    mask = pa.array([row is None for row in rows])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), array, mask=mask)


def _floats(values: Any) -> Floats | None:
    return None if values is None else np.asarray(values, dtype=np.float32)
