"""The columns of a recorded trajectory, and the objects that one row stands for.

    one row a trajectory
    choosing   id, group, split, step, reward, components, stop_reason, num_turns, …     plain values
    tokens     ids [of all spans]   logprobs, weights [of the spans that have them]
    training   advantages, policy_logprobs, entropies [of sampled tokens], trained_weights, dropped
    reading    trajectory: the record as `core/serde.py` writes it, without its arrays; a span says how long they are
    searching  texts [each text once]   tool_results [(name, error, duration_s)]

Values that a table, a chart or a search reads have columns; the rest is JSON. `to_rows.py` writes the columns and
`from_rows.py` reads them, those of earlier versions with the help of `older_versions.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from polyturn.core.arrays import Floats
from polyturn.core.trajectory import Trajectory
from polyturn.store.older_versions import read_floats

VERSION = 3
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

ARRAYS: dict[str, pa.DataType] = {
    "ids": pa.int32(),
    "logprobs": pa.float32(),
    "weights": pa.float32(),
    "advantages": pa.float32(),
    "policy_logprobs": pa.float32(),
    "entropies": pa.float32(),
    "trained_weights": pa.float32(),
}
"""The arrays over tokens, those of all spans joined."""
TOOL_RESULT = {"name": pa.string(), "error": pa.string(), "duration_s": pa.float64()}

SCHEMA = pa.schema(
    {
        **INDEX,
        "trajectory": pa.string(),
        "texts": pa.list_(pa.string()),
        "tool_results": pa.list_(pa.struct(TOOL_RESULT)),
        **{name: pa.list_(kind) for name, kind in ARRAYS.items()},
        "routed_experts": pa.large_binary(),
    },
    metadata={METADATA_KEY: str(VERSION)},
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
    """Why the whole trajectory was left out of the loss; None if it was not, or is not part of training."""


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
