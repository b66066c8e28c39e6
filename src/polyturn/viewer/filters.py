"""Filters the trajectories of a run for a page, counts their values, and exports them.

    ?split=train&min_reward=0.5&text=refund   ->  the rows that pass all filters

Filters compare columns with values or bounds, search texts for words or an expression, select labels, or use SQL.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from polyturn.core.errors import DataError, did_you_mean
from polyturn.core.serde import to_json
from polyturn.store.schema import INDEX_COLUMNS, SCHEMA
from polyturn.store.stored_run import StoredRun
from polyturn.viewer.labels import Label

Counts = NDArray[np.int64]
NUMERIC = ("step", "reward", "num_turns", "num_tokens", "num_sampled_tokens", "num_tool_calls", "num_tool_errors")
PLAIN = tuple(name for name in INDEX_COLUMNS if not pa.types.is_nested(SCHEMA.field(name).type))
"""Columns with single values, for comparing and sorting."""
_WHOLE_RUN = ("text", "regex", "where", "label", "note")
"""Filters that do not compare one column."""
MAX_VALUES = 12
"""Largest number of values to count per column; the most frequent ones."""
MAX_EXPORT = 20_000
"""Largest number of trajectories in one file."""
NUM_RANGES = 8
"""Number of ranges for a numeric column with more than `MAX_VALUES` values."""
FACETS = (
    ("split", "Split"),
    ("step", "Step"),
    ("stop_reason", "Stop reason"),
    ("data_source", "Data source"),
    ("num_tool_errors", "Failed tool calls"),
    ("num_turns", "Turns"),
    ("reward", "Reward"),
)


def narrow(
    run: StoredRun,
    wanted: Mapping[str, str],
    labels: Mapping[tuple[str, int, str], Label],
    *,
    stop: threading.Event | None = None,
) -> StoredRun:
    """Return the rows of a run that pass all filters.

    Args:
        run: The run.
        wanted: Filter -> value: a column's name for equality, `min_` or `max_` before a numeric column, `errors` ("1":
            failed or with a failed tool call), `text` (words; an expression if `regex` is "1"), `label` (one, or "*" for
            any), `note` (words), `where` (SQL).
        labels: The labels of the run.
        stop: Ends the search when set.

    Raises:
        DataError: a filter is invalid, or takes too long.
    """
    mask = _mask(run.table(), {key: value for key, value in wanted.items() if key not in _WHOLE_RUN})
    if mask is not None:
        run = run.keep(mask)
    if wanted.get("label") or wanted.get("note"):
        chosen = _with_label(labels, wanted.get("label", "*"), wanted.get("note", "").casefold().split())
        run = run.keep(_labelled(run.table(["id", "step", "split"]), chosen))
    if text := wanted.get("text"):
        run = run.search(text, is_expression=wanted.get("regex") == "1", stop=stop)
    return run.filter(wanted["where"], stop=stop) if wanted.get("where") else run


def facets(table: pa.Table) -> list[dict[str, Any]]:
    """Return for each column of `FACETS` its values with their numbers of rows; training comes before evaluations.

    A numeric column with more than `MAX_VALUES` values is divided into ranges, `low` to `high`, with about equally many
    rows. Any other column has its most frequent values, and the number of further ones.
    """
    columns = []
    for name, title in FACETS:
        counts = pc.value_counts(table[name].drop_null())
        values, numbers = counts.field("values"), counts.field("counts").to_numpy()
        if name in NUMERIC:
            known = values.to_numpy(zero_copy_only=False)
            order = np.argsort(known, kind="stable")[: np.count_nonzero(known == known)]  # NaN is sorted last and left out
            known, numbers = known[order], numbers[order]
            options = _ranges(known, numbers) if len(known) > MAX_VALUES else _values(known.tolist(), numbers)
        else:
            order = np.argsort(-numbers, kind="stable")[:MAX_VALUES]
            options = _values(values.take(pa.array(order)).to_pylist(), numbers[order])
            if name == "split":
                options.sort(key=lambda one: (not one["value"].startswith("train"), one["value"]))
        if len(options) > 1:
            num_more = 0 if name in NUMERIC else max(0, len(counts) - MAX_VALUES)
            columns.append({"name": name, "title": title, "values": options, "num_more": num_more})
    return columns


def _values(values: Iterable[Any], numbers: Counts) -> list[dict[str, Any]]:
    return [{"value": str(value), "count": count} for value, count in zip(values, numbers.tolist(), strict=True)]


def _ranges(known: NDArray[Any], numbers: Counts) -> list[dict[str, Any]]:
    """Divide ascending values [N], with `numbers` [N] rows each, into ranges with about equally many rows.

    A value with enough rows for a whole range forms its own range.
    """
    share = numbers.sum() / NUM_RANGES
    even = np.searchsorted(np.cumsum(numbers) - numbers, np.arange(NUM_RANGES) * share)
    full = np.flatnonzero(numbers >= share)
    starts = np.unique(np.concatenate([even, full, full + 1]))
    starts = starts[starts < len(known)]
    parts = zip(np.split(known, starts[1:]), np.split(numbers, starts[1:]), strict=True)
    return [{"low": str(v[0].item()), "high": str(v[-1].item()), "count": int(n.sum())} for v, n in parts]


def check_size(chosen: StoredRun) -> None:
    """Check that trajectories fit one file.

    Raises:
        DataError: there are more than `MAX_EXPORT`.
    """
    if len(chosen) > MAX_EXPORT:
        raise DataError(f"{len(chosen)} trajectories are selected, but a file may have {MAX_EXPORT}; filter the table first")


def as_jsonl(chosen: StoredRun) -> Iterator[bytes]:
    """Yield a line of JSON per trajectory: its position in the run and the whole record."""
    for record in chosen.records():
        line = {"group": record.group, "step": record.step, "split": record.split, "dropped": record.trained.dropped}
        yield json.dumps({**line, "trajectory": to_json(record.trajectory)}).encode() + b"\n"


def _with_label(labels: Mapping[tuple[str, int, str], Label], label: str, words: Sequence[str]) -> set[tuple[str, int, str]]:
    """Return the keys of trajectories with a label ("*": any label or note) and with all `words` in the note."""
    chosen = {key: one.note.casefold() for key, one in labels.items() if label in ("*", "", one.label)}
    return {key for key, note in chosen.items() if all(word in note for word in words)}


def _labelled(table: pa.Table, chosen: set[tuple[str, int, str]]) -> pa.Array:
    likely = pc.is_in(table["id"], pa.array([id for id, _, _ in chosen], pa.string())).to_numpy()
    mask = np.zeros(table.num_rows, np.bool_)
    for at in np.flatnonzero(likely).tolist():
        mask[at] = tuple(table.slice(at, 1).to_pylist()[0].values()) in chosen
    return pa.array(mask)


def _mask(table: pa.Table, wanted: Mapping[str, str]) -> Any:
    """Return a mask of the rows that pass all filters; None if there is no filter."""
    masks = []
    for key, value in wanted.items():
        if value == "":
            continue
        kind, _, column = key.partition("_") if key.startswith(("min_", "max_")) and key not in PLAIN else ("", "", key)
        if key == "errors":
            failed = pc.is_valid(table["error"])
            masks.append(pc.or_(failed, pc.fill_null(pc.greater(table["num_tool_errors"], 0), False)))
        elif kind and column in NUMERIC:
            compare = pc.greater_equal if kind == "min" else pc.less_equal
            masks.append(pc.fill_null(compare(table[column], _as_number(key, value)), False))
        elif column in PLAIN and not kind:
            operand: Any = value if pa.types.is_string(table[column].type) else _as_number(key, value)
            masks.append(pc.fill_null(pc.equal(table[column], operand), False))
        else:
            known = [*PLAIN, "errors", *_WHOLE_RUN, *(f"min_{c}" for c in NUMERIC)]
            raise DataError(f"there is no filter {key!r}.{did_you_mean(key, known)}")
    if not masks:
        return None
    mask = masks[0]
    for other in masks[1:]:
        mask = pc.and_(mask, other)
    return mask


def _as_number(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError as problem:
        raise DataError(f"the filter {key} is {value!r}; use a number") from problem
