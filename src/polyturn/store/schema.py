"""The columns of a recorded trajectory, and the objects that one row stands for.

    one row a trajectory
    choosing   id, group, split, step, reward, components, stop_reason, num_turns, …     plain values
    tokens     spans [(segment, source, turn, length, policy_version, …)]   ids [all]   logprobs [of sampled tokens]
    training   advantages, policy_logprobs, entropies [of sampled tokens], trained_weights, dropped
    reading    messages [(turn, role, text, …)]   tool_calls [(turn, name, arguments, …)]   tool_results [(turn, …)]

Arrays are list columns, so that other tools read them without a parser of ours; what has no fixed shape (an interaction's
metadata, a tool's arguments) is JSON in a string. Ids of all spans stand in one list, logprobs and weights only where a span
has them: a span says how many. `to_rows.py` writes the columns and `from_rows.py` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from polyturn.core.arrays import Floats
from polyturn.core.trajectory import Trajectory
from polyturn.store.codec import read_floats

VERSION = "2"
METADATA_KEY = "polyturn_store"

_NUMBERS = pa.map_(pa.string(), pa.float64())
INDEX: dict[str, pa.DataType] = {
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
"""The columns that a table of trajectories shows and is filtered by."""

NESTED: dict[str, dict[str, pa.DataType]] = {
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
        "origin": pa.string(),
        "written": pa.string(),
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
"""The lists of structs, and what each struct holds."""
JSON_MEMBERS = ("arguments", "metrics", "scores", "info", "timings")
"""Members of structs that are JSON in a string."""

_ARRAYS: dict[str, pa.DataType] = {
    "ids": pa.int32(),
    "logprobs": pa.float32(),
    "weights": pa.float32(),
    "advantages": pa.float32(),
    "policy_logprobs": pa.float32(),
    "entropies": pa.float32(),
    "trained_weights": pa.float32(),
}
_ROUTES: dict[str, pa.DataType] = {
    "routed_experts": pa.large_binary(),
    "routes_shape": pa.list_(pa.int32()),
    "routed_spans": pa.list_(pa.int32()),
}
"""Of a mixture of experts: the bytes of all routes joined, [layers, k, bytes a number], and which spans have any."""
_JSON = {"task": pa.string(), "reward_info": pa.string(), "metrics": pa.string()}

SCHEMA = pa.schema(
    {
        **INDEX,
        **_JSON,
        **{name: pa.list_(pa.struct(fields)) for name, fields in NESTED.items()},
        **{name: pa.list_(kind) for name, kind in _ARRAYS.items()},
        **_ROUTES,
    },
    metadata={METADATA_KEY: VERSION},
)
INDEX_COLUMNS = tuple(INDEX)
KEY = ("split", "step", "group", "id")
"""The key of a record: of two with the same key the later one counts."""
MAX_QUESTION = 200
"""Characters of the task's last message that the table of trajectories shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The results of training on one trajectory; every array is over its sampled tokens, in the order of the segments."""

    advantages: Floats | None = None
    policy_logprobs: Floats | None = None
    """The trainer's log-probabilities, beside the engine's in the spans."""
    entropies: Floats | None = None
    """In nats, of the policy where each token was drawn; 0 where no loss saw it."""
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


def upgrade(table: pa.Table) -> pa.Table:
    """Return the index columns of a table that an earlier version wrote, with nulls for what it did not record.

    Raises:
        KeyError: it has no column that every version wrote.
    """
    columns = []
    for name, kind in INDEX.items():
        if name not in table.column_names and name not in KEY:
            columns.append(pa.nulls(table.num_rows, kind))
        elif name == "components" and not pa.types.is_map(table[name].type):
            read = [None if v is None else list(read_floats(v).items()) for v in table[name].to_pylist()]
            columns.append(pa.array(read, kind))
        else:
            columns.append(table[name].cast(kind))
    return pa.table(columns, names=list(INDEX))
