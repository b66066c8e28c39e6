"""The columns of a recorded trajectory, and the objects that a row represents.

    one row per trajectory
    index      id, group, split, step, reward, components, stop_reason, num_turns, …     plain values
    tokens     ids [of all spans]   logprobs, weights [of the spans that have them]
    training   advantages, policy_logprobs, entropies [of sampled tokens], trained_weights, dropped
    record     trajectory: the record as `core/serde.py` writes it, without its arrays; each span has its length
    search     texts [each text once]   tool_results [(name, error, duration_s)]

Values for tables, charts and searches have columns; the rest is JSON. `to_rows.py` writes the columns and `from_rows.py`
reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from polyturn.core.arrays import Floats
from polyturn.core.trajectory import Trajectory

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
"""The columns by which a table of trajectories can be shown and filtered."""

ARRAYS: dict[str, pa.DataType] = {
    "ids": pa.int32(),
    "logprobs": pa.float32(),
    "weights": pa.float32(),
    "advantages": pa.float32(),
    "policy_logprobs": pa.float32(),
    "entropies": pa.float32(),
    "trained_weights": pa.float32(),
}
"""The arrays over tokens, concatenated over all spans."""
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
"""The key of a record; of two records with the same key, the later one counts."""
MAX_QUESTION = 200
"""Largest number of characters of the task's last message in the table of trajectories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The training results of one trajectory. Arrays are [sampled tokens], in the order of segments."""

    advantages: Floats | None = None
    policy_logprobs: Floats | None = None
    """Log-probabilities of the trainer; the spans have the engine's."""
    entropies: Floats | None = None
    """Entropy of the policy at each token in nats; 0 for tokens without a loss."""
    weights: Floats | None = None
    """Loss weights used in training; None if they equal the weights in the spans."""
    dropped: str | None = None
    """Why the whole trajectory was left out of the loss; None if it was used, or is not part of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTrajectory:
    """A recorded trajectory with its position in the run and its training results."""

    trajectory: Trajectory
    group: str
    step: int
    split: str
    trained: Trained = field(default_factory=Trained)

    def on_tokens(self, values: Floats) -> list[Floats]:
        """Return an array of `trained` as one array [T] per segment, NaN for tokens that were not sampled."""
        aligned, at = [], 0
        for segment in self.trajectory.segments:
            mask = segment.sampled_mask
            out = np.full(len(mask), np.nan, np.float32)
            out[mask] = values[at : at + int(mask.sum())]
            at += int(mask.sum())
            aligned.append(out)
        return aligned
