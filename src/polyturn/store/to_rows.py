"""From trajectories to a table: every column of `schema.py` filled, one row a trajectory.

    trajectories  ->  choosing columns, one value each
                  ->  lists of structs (spans, messages, …), gathered flat with an offset for each row
                  ->  lists of numbers (ids, logprobs, …), joined without a Python object for each number

`from_rows.py` is the way back, and gives an equal trajectory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from polyturn.core.arrays import Floats
from polyturn.core.messages import Message
from polyturn.core.trajectory import Span, SpanSource, Trajectory
from polyturn.store.codec import as_json, clean
from polyturn.store.schema import INDEX, JSON_MEMBERS, MAX_QUESTION, NESTED, SCHEMA, StoredTrajectory

_TIMES = ("generate", "tools", "interaction")


def to_table(rows: Sequence[StoredTrajectory]) -> pa.Table:
    """Return the rows as a table of `SCHEMA`."""
    columns: dict[str, pa.Array] = {}
    index = [_index_row(row) for row in rows]
    for name, kind in INDEX.items():
        columns[name] = pa.array([row[name] for row in index], kind)
    trajectories = [row.trajectory for row in rows]
    columns["task"] = _json_column(t.task for t in trajectories)
    columns["reward_info"] = _json_column(None if t.reward is None else t.reward.info for t in trajectories)
    columns["metrics"] = _json_column(t.metrics for t in trajectories)
    nested: dict[str, _Nested] = {name: _Nested(fields) for name, fields in NESTED.items()}
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
    columns["entropies"] = _optional([row.trained.entropies for row in rows])
    columns["trained_weights"] = _optional([row.trained.weights for row in rows])
    columns |= _routes(spans)
    return pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)


class _Nested:
    """A column of lists of structs, gathered flat."""

    def __init__(self, fields: Mapping[str, pa.DataType]) -> None:
        self._fields = fields
        self._flat: dict[str, list[Any]] = {name: [] for name in fields}
        self._count, self._offsets = 0, [0]

    def add(self, value: object = None, **own: Any) -> None:
        """Add a struct: what `own` says, and the attributes of `value` under the other names."""
        for name, of in self._flat.items():
            of.append(own[name] if name in own else _written(name, attrgetter(name)(value)))
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
            nested["media"].add(segment=number, kind=medium.kind, source=as_json(medium.source))
        for index, span in enumerate(segment.spans):
            at[number, index] = len(at)
            has = {"has_logprobs": span.logprobs is not None, "has_weights": span.weights is not None}
            nested["spans"].add(span, segment=number, length=len(span), **has)
    count = 0
    for message in trajectory.task.prompt:
        count = _add_message(nested, message, turn=-1, number=count)
    for number, turn in enumerate(trajectory.turns):
        for message in (turn.message, *turn.observation):
            count = _add_message(nested, message, turn=number, number=count)
        for result in turn.tool_results:
            text, parts = _split(result.content)
            nested["tool_results"].add(result, turn=number, text=text, parts=parts)
        nested["turns"].add(turn, spans=[at[ref.segment, ref.span] for ref in turn.spans])


def _add_message(nested: Mapping[str, _Nested], message: Message, *, turn: int, number: int) -> int:
    text, parts = _split(message.content)
    nested["messages"].add(message, turn=turn, text=text, parts=parts)
    for call in message.tool_calls:
        nested["tool_calls"].add(call, message=number, turn=turn)
    return number + 1


def _written(name: str, value: Any) -> Any:
    """Return a member of a struct as its column holds it."""
    if name in JSON_MEMBERS:
        return as_json(value)
    return value.value if isinstance(value, Enum) else value


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
        "error": None if trajectory.error is None else clean(trajectory.error),
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
        "question": clean(prompt[-1].text[:MAX_QUESTION]) if prompt else "",
    }


def _split(content: Any) -> tuple[str | None, str | None]:
    """Return content as text, or as JSON of its parts."""
    return (content, None) if isinstance(content, str) else (None, as_json(content))


def _json_column(values: Iterable[Any]) -> pa.Array:
    return pa.array([None if v is None else as_json(v) for v in values], pa.string())


def _storable(values: list[Any], kind: pa.DataType) -> list[Any]:
    return [clean(v) for v in values] if pa.types.is_string(kind) else values


def _arrays(rows: Sequence[Sequence[Any]], dtype: type[Any]) -> pa.Array:
    """Return a list column, the arrays of each row joined."""
    lengths = [sum(len(a) for a in row) for row in rows]
    flat = [a for row in rows for a in row]
    values = np.concatenate(flat) if flat else np.empty(0, dtype)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values.astype(dtype, copy=False)))


def _routes(rows: Sequence[Sequence[Span]]) -> dict[str, pa.Array]:
    """Return the columns of the experts that tokens went to, null where a row has none."""
    routed = [[i for i, span in enumerate(spans) if span.routed_experts is not None] for spans in rows]
    arrays = [[span.routed_experts for span in spans if span.routed_experts is not None] for spans in rows]
    shapes = [[*of[0].shape[1:], of[0].itemsize] if of else None for of in arrays]
    return {
        "routed_experts": pa.array([b"".join(a.tobytes() for a in of) if of else None for of in arrays], pa.large_binary()),
        "routes_shape": pa.array(shapes, pa.list_(pa.int32())),
        "routed_spans": pa.array([which or None for which in routed], pa.list_(pa.int32())),
    }


def _optional(rows: Sequence[Floats | None]) -> pa.Array:
    """Return a list column that is null where a row has no array."""
    lengths = [0 if row is None else len(row) for row in rows]
    flat = [row for row in rows if row is not None]
    values = np.concatenate(flat) if flat else np.empty(0, np.float32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    array = pa.array(values.astype(np.float32, copy=False))
    mask = pa.array([row is None for row in rows])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), array, mask=mask)
