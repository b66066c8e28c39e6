"""Converts trajectories to a table with the columns of `schema.py`, one row per trajectory.

    trajectories  ->  index columns, one value each
                  ->  JSON of everything except arrays, and the texts for searches
                  ->  lists of numbers (ids, logprobs, …), concatenated without a Python object per number

`from_rows.py` converts rows back to equal trajectories.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from polyturn.core.arrays import Floats
from polyturn.core.serde import to_json
from polyturn.core.trajectory import Segment, Span, SpanSource, Trajectory
from polyturn.store.schema import MAX_QUESTION, SCHEMA, StoredTrajectory

_TIMES = ("generate", "tools", "interaction")


def to_table(rows: Sequence[StoredTrajectory]) -> pa.Table:
    """Return the rows as a table of `SCHEMA`."""
    trajectories = [row.trajectory for row in rows]
    spans = [[s for segment in t.segments for s in segment.spans] for t in trajectories]
    index = [_index_row(row) for row in rows]
    columns: dict[str, Any] = {
        **{name: [row[name] for row in index] for name in index[0]},
        "trajectory": [_as_json(t) for t in trajectories],
        "texts": [list(dict.fromkeys(map(_plain, _texts(t)))) for t in trajectories],
        "tool_results": [
            [
                {"name": _plain(r.name), "error": r.error, "duration_s": r.duration_s}
                for turn in t.turns
                for r in turn.tool_results
            ]
            for t in trajectories
        ],
        "ids": _arrays([[s.ids for s in of] for of in spans], np.int32),
        "logprobs": _arrays([[s.logprobs for s in of if s.logprobs is not None] for of in spans]),
        "weights": _arrays([[s.weights for s in of if s.weights is not None] for of in spans]),
        "advantages": _optional([row.trained.advantages for row in rows]),
        "policy_logprobs": _optional([row.trained.policy_logprobs for row in rows]),
        "entropies": _optional([row.trained.entropies for row in rows]),
        "trained_weights": _optional([row.trained.weights for row in rows]),
        "routed_experts": [
            b"".join(s.routed_experts.tobytes() for s in of if s.routed_experts is not None) or None for of in spans
        ],
    }
    typed = {
        f.name: columns[f.name] if isinstance(columns[f.name], pa.Array) else pa.array(columns[f.name], f.type)
        for f in SCHEMA
    }
    return pa.table(typed, schema=SCHEMA)


def _as_json(trajectory: Trajectory) -> str:
    """Return a trajectory as JSON, without its arrays."""
    names = (f.name for f in dataclasses.fields(trajectory))
    data = {name: to_json(getattr(trajectory, name)) for name in names if name != "segments"}
    return json.dumps({**data, "segments": [_segment(s) for s in trajectory.segments]}, separators=(",", ":"))


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        "spans": [_span(span) for span in segment.spans],
        "media": to_json(segment.media),
        "agent": segment.agent,
        "parent": to_json(segment.parent),
    }


def _span(span: Span) -> dict[str, Any]:
    routes = span.routed_experts
    return {
        "source": span.source.value,
        "turn": span.turn,
        "policy_version": span.policy_version,
        "length": len(span),
        "has_logprobs": span.logprobs is not None,
        "has_weights": span.weights is not None,
        "routes_shape": None if routes is None else [*routes.shape[1:], routes.itemsize],
    }


def _texts(trajectory: Trajectory) -> Iterator[str]:
    """Yield the texts for searches."""
    messages = [*trajectory.task.prompt]
    for turn in trajectory.turns:
        messages += [turn.message, *turn.observation]
        for result in turn.tool_results:
            if isinstance(result.content, str):
                yield result.content
            if result.error is not None:
                yield result.error
    for message in messages:
        yield message.text
        if message.reasoning is not None:
            yield message.reasoning
        for call in message.tool_calls:
            yield json.dumps(to_json(call.arguments), ensure_ascii=False)


def _plain(text: str) -> str:
    """Return a text that can be written as UTF-8, for columns that are only displayed: lone surrogates become \\udc80."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


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
        "error": None if trajectory.error is None else _plain(trajectory.error),
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
        "question": _plain(prompt[-1].text[:MAX_QUESTION]) if prompt else "",
    }


def _arrays(rows: Sequence[Sequence[Any] | None], dtype: type[Any] = np.float32) -> pa.Array:
    """Return a list column with the arrays of each row concatenated; null for a row that is None."""
    lengths = [sum(len(a) for a in row or ()) for row in rows]
    flat = [a for row in rows for a in row or ()]
    values = np.concatenate(flat) if flat else np.empty(0, dtype)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    mask = pa.array([row is None for row in rows])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values.astype(dtype, copy=False)), mask=mask)


def _optional(rows: Sequence[Floats | None]) -> pa.Array:
    return _arrays([None if row is None else [row] for row in rows])
