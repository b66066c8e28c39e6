"""Converts the rows of a part back to trajectories, bit for bit equal to the recorded ones.

    {"spans": [{"length": 2, "has_logprobs": true, …}]}  +  ids, logprobs, weights  ->  spans

A row's arrays are split by the lengths of its spans, and `core/serde.py` creates the objects.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from polyturn.core.errors import DataError
from polyturn.core.serde import from_json
from polyturn.core.trajectory import Trajectory
from polyturn.store.part_file import PartFile
from polyturn.store.schema import ARRAYS, StoredTrajectory, Trained

UNREADABLE = (
    pa.ArrowException, OSError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
"""Errors from reading a file that is damaged, malicious, or not part of a run."""
_PLAIN = ("id", "group", "step", "split", "dropped", "routed_experts", "trajectory")


def read_rows(file: PartFile, rows: Sequence[int], *, damaged: Callable[[int, Exception], object]) -> list[StoredTrajectory]:
    """Return rows of a part in the given order; damaged rows are left out and passed to `damaged`."""
    records = []
    for row, values in _values(file, rows, {*_PLAIN, *ARRAYS}):
        try:
            records.append(_record(values))
        except UNREADABLE as problem:  # other rows are not affected
            damaged(row, problem)
    return records


def _values(file: PartFile, rows: Sequence[int], columns: set[str]) -> list[tuple[int, dict[str, Any]]]:
    """Return (row number, values) pairs; arrays over tokens are NumPy arrays."""
    starts = np.cumsum([0, *file.rows_of_groups])
    row_by_index: dict[int, dict[str, Any]] = {}
    for number in range(len(file.rows_of_groups)):
        inside = [row for row in rows if starts[number] <= row < starts[number + 1]]
        if not inside:
            continue
        whole = file.read([name for name in file.schema.names if name in columns], groups=[number])
        table = whole.take(pa.array([row - int(starts[number]) for row in inside]))
        arrays = {name: table[name].combine_chunks() for name in ARRAYS if name in table.column_names}
        plain = table.drop_columns(list(arrays)).to_pylist()
        for index, (row, values) in enumerate(zip(inside, plain, strict=True)):
            for name, column in arrays.items():
                values[name] = column[index].values.to_numpy() if column[index].is_valid else None
            row_by_index[row] = values
    return [(row, row_by_index[row]) for row in rows]


def _record(row: Mapping[str, Any]) -> StoredTrajectory:
    """Return the trajectory of one row.

    Raises:
        DataError: an array's length does not match its tokens, or a column has the wrong type.
    """
    for name, kind in (("id", str), ("group", str), ("step", int), ("split", str), ("dropped", str | None)):
        if not isinstance(row.get(name), kind):
            raise DataError(f"its column {name} holds {row.get(name)!r:.80}")
    trajectory = from_json(Trajectory, _with_arrays({**json.loads(row["trajectory"]), "id": row["id"]}, row))
    arrays = {
        name: None if row[name] is None else np.asarray(row[name], dtype=np.float32)
        for name in ("advantages", "policy_logprobs", "entropies", "trained_weights")
    }
    for name, array in arrays.items():
        if array is not None:
            _check_length(name, len(array), trajectory.num_sampled_tokens, "tokens were sampled")
    trained = Trained(weights=arrays.pop("trained_weights"), dropped=row.get("dropped"), **arrays)
    return StoredTrajectory(trajectory=trajectory, group=row["group"], step=row["step"], split=row["split"], trained=trained)


def _with_arrays(data: dict[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Add ids, logprobs, weights and routes to each span."""
    arrays = {name: np.asarray(row[name]) for name in ("ids", "logprobs", "weights")}
    arrays["routed_experts"] = np.frombuffer(row.get("routed_experts") or b"", np.uint8)
    at = dict.fromkeys(arrays, 0)

    def take(name: str, length: int) -> Any:
        at[name] += length
        return arrays[name][at[name] - length : at[name]]

    for span in (span for segment in data["segments"] for span in segment["spans"]):
        length, shape = span.pop("length"), span.pop("routes_shape")
        span["ids"] = take("ids", length)
        span["logprobs"] = take("logprobs", length) if span.pop("has_logprobs") else None
        span["weights"] = take("weights", length) if span.pop("has_weights") else None
        if shape is not None:
            layers, k, itemsize = shape
            routes = take("routed_experts", length * layers * k * itemsize).view(np.uint8 if itemsize == 1 else np.uint16)
            span["routed_experts"] = routes.reshape(length, layers, k)
    for name, array in arrays.items():
        _check_length(name, len(array), at[name], "belong to its spans")
    for turn in data["turns"]:
        for segment, number in turn["spans"]:
            data["segments"][segment]["spans"][number]  # raises LookupError if a turn refers to a missing span
    return data


def _check_length(name: str, length: int, expected: int, what: str) -> None:
    if length != expected:
        raise DataError(f"its column {name} has {length} numbers, but {expected} {what}")
