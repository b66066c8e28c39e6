"""From the rows of a part back to trajectories, each equal to the one that was recorded, bit for bit.

    spans [(segment, length, has_logprobs, …)] cut the joined ids, logprobs and weights into spans, these into segments
    messages, tool_calls and tool_results find each other by turn and by the number of the message

What is put together here has the shape of `core/serde.py`, whose `from_json` makes the objects: a trajectory is written down
in one way, of which the columns are an arrangement. Reads what `to_rows.py` wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from polyturn.core.arrays import Floats
from polyturn.core.errors import DataError
from polyturn.core.serde import from_json
from polyturn.core.trajectory import Trajectory
from polyturn.store.codec import read_json, restore, restore_all
from polyturn.store.part_file import PartFile
from polyturn.store.schema import JSON_MEMBERS, METADATA_KEY, SCHEMA, VERSION, StoredTrajectory, Trained

UNREADABLE = (
    pa.ArrowException, OSError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
"""Errors from a file that is not part of a run, or that was made to break its reader."""
_ARRAY_COLUMNS = ("ids", "logprobs", "weights", "advantages", "policy_logprobs", "entropies", "trained_weights")


def read_rows(file: PartFile, rows: Sequence[int], *, damaged: Callable[[int, Exception], object]) -> list[StoredTrajectory]:
    """Return rows of a part in this order, without those that are damaged, each of which `damaged` is told.

    Raises:
        DataError: the part is of a newer version.
    """
    version = (file.schema.metadata or {}).get(METADATA_KEY.encode(), b"1").decode()
    if version == "1":
        return _first_version(file, rows)
    if version > VERSION:
        raise DataError(f"it is of version {version} and this polyturn reads up to {VERSION}; use a newer one")
    records = []
    for row, values in _second_version(file, rows):
        try:
            records.append(from_row(values))
        except UNREADABLE as problem:  # it costs no other row
            damaged(row, problem)
    return records


def _second_version(file: PartFile, rows: Sequence[int]) -> list[tuple[int, dict[str, Any]]]:
    """Return the values of rows, arrays over tokens as NumPy arrays, each behind its number."""
    starts = np.cumsum([0, *file.rows_of_groups])
    row_by_index: dict[int, dict[str, Any]] = {}
    for number in range(len(file.rows_of_groups)):
        inside = [row for row in rows if starts[number] <= row < starts[number + 1]]
        if not inside:
            continue
        whole = file.read(SCHEMA.names, groups=[number])
        table = whole.take(pa.array([row - int(starts[number]) for row in inside]))
        arrays = {name: table[name].combine_chunks() for name in _ARRAY_COLUMNS if name in table.column_names}
        plain = table.drop_columns(list(arrays)).to_pylist()
        for index, (row, values) in enumerate(zip(inside, plain, strict=True)):
            for name, column in arrays.items():
                values[name] = column[index].values.to_numpy() if column[index].is_valid else None
            row_by_index[row] = values
    return [(row, row_by_index[row]) for row in rows]


def _first_version(file: PartFile, rows: Sequence[int]) -> list[StoredTrajectory]:
    """Read rows whose trajectory is one JSON text, as the first version of the store wrote them."""
    table = file.read(["payload", "group", "step", "split"]).take(pa.array(rows, pa.int64()))
    return [
        StoredTrajectory(
            trajectory=from_json(Trajectory, json.loads(row["payload"])),
            group=row["group"],
            step=row["step"],
            split=row["split"],
        )
        for row in table.to_pylist()
    ]


def from_row(row: Mapping[str, Any]) -> StoredTrajectory:
    """Return the trajectory of one row, as `pa.Table.to_pylist` gives it, arrays as lists or as NumPy arrays.

    Raises:
        DataError: an array has another length than the tokens that it describes, or a column is of another type.
    """
    for name, kind in (("group", str), ("step", int), ("split", str), ("dropped", str | None)):
        if not isinstance(row[name], kind):
            raise DataError(f"its column {name} holds {row[name]!r:.80}")
    segments, places = _segments(row)
    messages = _messages(row)
    results: dict[int, list[dict[str, Any]]] = {}
    for result in row["tool_results"]:
        results.setdefault(result["turn"], []).append(_with_content(_plain(result, but=("turn",))))
    turns = [
        {
            **_plain(turn),
            "message": messages[number][0],
            "spans": [places[i] for i in turn["spans"]],
            "tool_results": results.get(number, []),
            "observation": messages[number][1:],
        }
        for number, turn in enumerate(row["turns"])
    ]
    reward = None
    if row["reward"] is not None:
        reward = {"total": row["reward"], "components": dict(row["components"]), "info": read_json(row["reward_info"])}
    trajectory = {
        "id": row["id"],
        "task": read_json(row["task"]),
        "segments": segments,
        "turns": turns,
        "stop_reason": row["stop_reason"],
        "reward": reward,
        "error": restore(row["error"]),
        "metrics": read_json(row["metrics"]),
    }
    trajectory_read = from_json(Trajectory, trajectory)
    trained = Trained(
        advantages=_floats(row["advantages"]),
        policy_logprobs=_floats(row["policy_logprobs"]),
        entropies=_floats(row.get("entropies")),  # older files have no such column
        weights=_floats(row["trained_weights"]),
        dropped=row["dropped"],
    )
    for name in ("advantages", "policy_logprobs", "entropies", "trained_weights"):
        if row.get(name) is not None:
            _check_length(name, len(row[name]), trajectory_read.num_sampled_tokens, "tokens were sampled")
    return StoredTrajectory(
        trajectory=trajectory_read,
        group=row["group"],
        step=row["step"],
        split=row["split"],
        trained=trained,
    )


def _segments(row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
    """Return the segments, and for each span of the row its segment and its place there."""
    arrays = {name: np.asarray(row[name]) for name in ("ids", "logprobs", "weights")}
    at = dict.fromkeys(arrays, 0)

    def take(name: str, length: int, *, is_there: bool = True) -> Any:
        if not is_there:
            return None
        at[name] += length
        return arrays[name][at[name] - length : at[name]]

    segments: list[dict[str, Any]] = []
    for segment in map(restore_all, row["segments"]):
        parent = None if segment["parent_segment"] is None else (segment["parent_segment"], segment["parent_length"])
        segments.append({"spans": [], "media": [], "agent": segment["agent"], "parent": parent})
    places = []
    routed = row.get("routed_spans") or ()  # older files have no such column
    routes = dict(zip(routed, _routes(row, [row["spans"][i]["length"] for i in routed]), strict=True))
    for span in row["spans"]:
        of, length = segments[span["segment"]]["spans"], span["length"]
        places.append((span["segment"], len(of)))
        of.append(
            {
                "ids": take("ids", length),
                "source": span["source"],
                "turn": span["turn"],
                "logprobs": take("logprobs", length, is_there=span["has_logprobs"]),
                "policy_version": span["policy_version"],
                "weights": take("weights", length, is_there=span["has_weights"]),
                "routed_experts": routes.get(len(places) - 1),
            }
        )
    for name, array in arrays.items():
        _check_length(name, len(array), at[name], "belong to its spans")
    for medium in row["media"]:
        source = read_json(medium["source"])
        segments[medium["segment"]]["media"].append({"kind": medium["kind"], "source": source})
    return segments, places


def _check_length(name: str, length: int, expected: int, what: str) -> None:
    if length != expected:
        raise DataError(f"its column {name} holds {length} numbers, and {expected} {what}")


def _routes(row: Mapping[str, Any], lengths: Sequence[int]) -> Iterator[Any]:
    """Yield the experts of each span that has any, [length, layers, k]."""
    if lengths:
        layers, k, itemsize = row["routes_shape"]
        flat = np.frombuffer(row["routed_experts"], np.uint8 if itemsize == 1 else np.uint16).reshape(-1, layers, k)
        yield from np.split(flat, np.cumsum(lengths)[:-1])


def _messages(row: Mapping[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """Return the messages of each turn: the model's, then what the environment answered."""
    calls: dict[int, list[dict[str, Any]]] = {}
    for call in row["tool_calls"]:
        calls.setdefault(call["message"], []).append(_plain(call, but=("message", "turn")))
    messages: dict[int, list[dict[str, Any]]] = {}
    for number, message in enumerate(row["messages"]):
        message_read = _with_content(_plain(message, but=("turn",)))
        messages.setdefault(message["turn"], []).append({**message_read, "tool_calls": calls.get(number, [])})
    return messages


def _plain(struct: Mapping[str, Any], *, but: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a struct with its texts restored and its JSON read, without the members that only say where it belongs."""
    return {
        name: read_json(value) if name in JSON_MEMBERS else restore(value) if isinstance(value, str) else value
        for name, value in struct.items()
        if name not in but
    }


def _with_content(message: dict[str, Any]) -> dict[str, Any]:
    """Put the text, or the parts, of a message or a tool's result in the place of its two columns."""
    text, parts = message.pop("text"), message.pop("parts")
    return {**message, "content": text if parts is None else read_json(parts)}


def _floats(values: Any) -> Floats | None:
    return None if values is None else np.asarray(values, dtype=np.float32)
