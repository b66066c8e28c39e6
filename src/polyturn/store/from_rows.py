"""From a row back to its trajectory, equal to the one that was recorded, bit for bit.

    spans [(segment, length, has_logprobs, …)] cut the joined ids, logprobs and weights into spans, these into segments
    messages, tool_calls and tool_results find each other by turn and by the number of the message

What is put together here has the shape of `core/serde.py`, whose `from_json` makes the objects: a trajectory is written down
in one way, of which the columns are an arrangement. Reads what `to_rows.py` wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from polyturn.core.arrays import Floats
from polyturn.core.errors import DataError
from polyturn.core.serde import from_json
from polyturn.core.trajectory import Trajectory
from polyturn.store.codec import read_json, restore, restore_all
from polyturn.store.schema import JSON_MEMBERS, StoredTrajectory, Trained


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
    made = from_json(Trajectory, trajectory)
    trained = Trained(
        advantages=_floats(row["advantages"]),
        policy_logprobs=_floats(row["policy_logprobs"]),
        entropies=_floats(row.get("entropies")),  # older files have no such column
        weights=_floats(row["trained_weights"]),
        dropped=row["dropped"],
    )
    for name in ("advantages", "policy_logprobs", "entropies", "trained_weights"):
        if row.get(name) is not None:
            _check_length(name, len(row[name]), made.num_sampled_tokens, "tokens were sampled")
    return StoredTrajectory(
        trajectory=made,
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
    found: dict[int, list[dict[str, Any]]] = {}
    for number, message in enumerate(row["messages"]):
        made = _with_content(_plain(message, but=("turn",)))
        found.setdefault(message["turn"], []).append({**made, "tool_calls": calls.get(number, [])})
    return found


def _plain(struct: Mapping[str, Any], *, but: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a struct with its texts restored and its JSON read, without the members that only say where it belongs."""
    return {
        name: read_json(value) if name in JSON_MEMBERS else restore(value) if isinstance(value, str) else value
        for name, value in struct.items()
        if name not in but
    }


def _with_content(made: dict[str, Any]) -> dict[str, Any]:
    """Put the text, or the parts, of a message or a tool's result in the place of its two columns."""
    text, parts = made.pop("text"), made.pop("parts")
    return {**made, "content": text if parts is None else read_json(parts)}


def _floats(values: Any) -> Floats | None:
    return None if values is None else np.asarray(values, dtype=np.float32)
