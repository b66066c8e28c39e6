"""RunView: what the pages show of one run, as plain data for JSON.

A run goes on while it is looked at, so everything is read as far as it is written; each answer first asks the store and the
metrics file whether there is more. What cannot be read is named in `problems`, never hidden and never fatal.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polyturn.core.contained import contained, read_contained
from polyturn.core.errors import DataError, did_you_mean, one_line
from polyturn.core.metrics_file import MAX_BYTES, parse_line
from polyturn.core.trajectory import Trajectory
from polyturn.store.parquet_store import FOLDER
from polyturn.store.schema import INDEX_COLUMNS, SCHEMA
from polyturn.store.stored_run import StoredRun
from polyturn.viewer.tokens import TokenTexts
from polyturn.viewer.trajectory_page import plain, trajectory_page

MAX_CONFIG_BYTES = 1 << 20
"""Bytes of a run's configuration that are shown."""
_NUMERIC = ("step", "reward", "num_turns", "num_tokens", "num_sampled_tokens", "num_tool_calls", "num_tool_errors")
_PLAIN = tuple(name for name in INDEX_COLUMNS if not pa.types.is_nested(SCHEMA.field(name).type))
"""Columns of single values, which can be compared and sorted by."""


class RunView:
    """One run, read-only."""

    def __init__(self, folder: Path) -> None:
        """Open the run in `folder`, whatever it holds so far."""
        self.folder = folder
        self.name = folder.resolve().name
        self._store = StoredRun(folder)
        self._texts: TokenTexts | None = None
        self._metrics = _Lines(folder, "metrics.jsonl")
        self._warm_start = _Lines(folder, "sft_metrics.jsonl")

    def summary(self) -> dict[str, Any]:
        """Return what the list of runs shows."""
        self.refresh()

        def known(column: str) -> list[str]:
            return sorted(v for v in pc.unique(self._store.table([column])[column]).to_pylist() if v)

        steps = [m["step"] for m in self._metrics.read if "step" in m]
        return {
            "name": self.name,
            "folder": str(self.folder),
            "num_trajectories": len(self._store),
            "splits": known("split"),
            "stop_reasons": known("stop_reason"),
            "data_sources": known("data_source"),
            "last_step": max(steps, default=None),
            "num_metrics": len(self._metrics.read) + len(self._warm_start.read),
            "problems": self.problems(),
            "has_tokenizer": self._tokens().is_known,
        }

    def unreadable(self, why: str) -> dict[str, Any]:
        """Return what the list shows of the run when nothing of it can be read."""
        nothing = {"num_trajectories": 0, "splits": [], "stop_reasons": [], "data_sources": [], "last_step": None}
        known = {"name": self.name, "folder": str(self.folder), "num_metrics": 0, "has_tokenizer": False}
        return {**known, **nothing, "problems": [f"the run cannot be read: {why}"]}

    def problems(self) -> list[str]:
        """Return a sentence for each thing of the run that cannot be read."""
        found = [f"{FOLDER}/{name} was skipped: {reason}" for name, reason in self._store.problems.items()]
        is_warming_up = bool(self._warm_start.read) and not self._metrics.is_there
        if not (self.folder / FOLDER).is_dir() and not is_warming_up:
            found.append(f"the run recorded no trajectories (there is no {FOLDER}/)")
        if not self._metrics.is_there and not is_warming_up and not self._metrics.problem:
            found.append("the run recorded no metrics (there is no metrics.jsonl)")
        return found + self._metrics.problems() + self._warm_start.problems()

    def refresh(self) -> None:
        """Read what was written since the last time."""
        self._store.refresh()
        self._metrics.refresh()
        self._warm_start.refresh()

    def metrics(self, since: str = "") -> dict[str, Any]:
        """Return the lines of metrics behind a cursor, those of the warm start with names under `warm_start/`.

        Args:
            since: What an earlier answer called `next`; "" from the beginning.

        Returns:
            `lines`, `next`, `alarms`, and `is_new`: whether these lines stand in place of all that were read before.
        """
        self.refresh()
        files = (self._metrics, self._warm_start)
        known = [int(n) if n.isdecimal() else 0 for n in since.split(".")] + [0, 0]
        is_new = any(n > len(file.read) for n, file in zip(known, files, strict=False))
        begin, warm = (0, 0) if is_new else known[:2]
        warming = [
            {k if k == "step" else f"warm_start/{k}": v for k, v in line.items()} for line in self._warm_start.read[warm:]
        ]
        lines = self._metrics.read[begin:] + warming
        return {
            "lines": lines,
            "next": ".".join(str(len(file.read)) for file in files),
            "is_new": is_new,
            "alarms": self._alarms(),
        }

    def config(self) -> str:
        """Return the run's configuration as it was written; "" if it is not there.

        Raises:
            DataError: it is no file of the run's folder, or larger than any.
        """
        return read_contained(self.folder, "config.yaml", max_bytes=MAX_CONFIG_BYTES) or ""

    def page(
        self,
        wanted: Mapping[str, str],
        *,
        sort: str = "",
        descending: bool = False,
        offset: int = 0,
        limit: int = 100,
        stop: threading.Event | None = None,
    ) -> dict[str, Any]:
        """Return one page of the table of trajectories.

        Args:
            wanted: Filters: a column's name for equality (`split`, `group`, `stop_reason`, …), `min_` or `max_` before a
                numeric one, `errors` ("1": failed or with a failed tool call), `text` (in question, task or id), `where`
                (an SQL condition).
            sort: A column; "" is the order of recording.
            descending: Largest first.
            offset: The first row.
            limit: Rows at most.
            stop: Ends the search for what `where` says when it is set.

        Raises:
            DataError: a filter or the condition cannot be understood.
        """
        self._store.refresh()
        store = self._store if not wanted.get("where") else self._store.filter(wanted["where"], stop=stop)
        table = store.table()
        mask = _mask(table, {k: v for k, v in wanted.items() if k != "where"})
        if mask is not None:
            table = table.filter(mask)
        total = table.num_rows
        if sort:
            if sort not in _PLAIN:
                raise DataError(f"there is no column {sort!r} to sort by.{did_you_mean(sort, _PLAIN)}")
            order = pc.sort_indices(table, [(sort, "descending" if descending else "ascending")])
            table = table.take(order[offset : offset + limit])
        else:
            if descending:
                offset = max(0, total - offset - limit) if total - offset > 0 else total
            table = table.slice(offset, limit)
        rows = [plain(row) for row in table.to_pylist()]
        if not sort and descending:
            rows.reverse()
        return {"total": total, "rows": rows}

    def groups(self, wanted: Mapping[str, str], *, offset: int = 0, limit: int = 100) -> dict[str, Any]:
        """Return groups with the rewards of their members and their spread, the latest first."""
        self._store.refresh()
        table = self._store.table()
        mask = _mask(table, wanted)
        if mask is not None:
            table = table.filter(mask)
        table = table.append_column("at", pa.array(np.arange(table.num_rows)))
        found = (
            table.group_by(["split", "step", "group"])
            .aggregate([("at", "max"), ("reward", "mean"), ("reward", "stddev"), ("reward", "list"), ("id", "list"),
                        ("stop_reason", "list"), ("dropped", "min"), ("question", "min"), ("num_turns", "mean")])
            .sort_by([("at_max", "descending")])
        )  # fmt: skip
        rows = found.slice(offset, limit).to_pylist()
        return {"total": found.num_rows, "rows": [plain(row) for row in rows]}

    def timeline(self, *, step: int, split: str, limit: int = 400) -> dict[str, Any]:
        """Return, for the episodes of one step, when each turn began and what its time went into."""
        chosen = self._store.select(step=step, split=split)
        episodes: list[tuple[Trajectory, list[dict[str, float]]]] = []
        for record in chosen.records():
            turns = [dict(t.timings) for t in record.trajectory.turns]
            if turns and all("start" in t for t in turns):
                episodes.append((record.trajectory, turns))
            if len(episodes) >= limit:
                break
        begin = min((turns[0]["start"] for _, turns in episodes), default=0.0)
        lanes = [
            {
                "id": trajectory.id,
                "stop": trajectory.stop_reason.value,
                "turns": [{**turn, "start": turn["start"] - begin} for turn in turns],
            }
            for trajectory, turns in episodes
        ]
        return {"episodes": lanes, "total": len(chosen)}

    def trajectory(
        self, id: str, *, step: int | None, split: str | None, segment: int = 0, start: int = 0
    ) -> dict[str, Any]:
        """Return one trajectory: as a conversation and as tokens, those of one segment from number `start` on.

        Raises:
            DataError: there is none of this id.
        """
        return trajectory_page(self._store.record(id, step=step, split=split), self._tokens(), segment=segment, start=start)

    def _tokens(self) -> TokenTexts:
        if self._texts is None or not self._texts.is_known:
            self._texts = TokenTexts(self.folder)  # a run that has just begun may have none yet
        return self._texts

    def _alarms(self) -> list[dict[str, Any]]:
        try:
            text = read_contained(self.folder, "alarms.jsonl", max_bytes=MAX_BYTES)
        except DataError as problem:
            return [_damaged(str(problem))]
        return [_alarm(line) for line in (text or "").splitlines()]


class _Lines:
    """A file of metrics that grows while it is read."""

    def __init__(self, folder: Path, name: str) -> None:
        self.read: list[dict[str, Any]] = []
        self.problem = ""
        self.is_there = True  # until it has been looked for
        self._folder, self._name = folder, name
        self._read_to = self._bad_lines = 0

    def refresh(self) -> None:
        """Read the lines that are whole by now."""
        try:
            self._refresh()
        except (DataError, OSError) as problem:
            self.problem = str(problem)

    def _refresh(self) -> None:
        path = contained(self._folder, self._name)
        self.problem, self.is_there = "", path is not None
        if path is None:
            return
        size = path.stat().st_size
        if size < self._read_to:  # a resumed run drops the steps that it takes again
            self.read, self._read_to, self._bad_lines = [], 0, 0
        with path.open("rb") as file:
            file.seek(self._read_to)
            new = file.read(max(0, MAX_BYTES - self._read_to))
        if size > MAX_BYTES:
            self.problem = f"{self._name} has {size} bytes, and only the first {MAX_BYTES} are shown"
        whole = new[: new.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for line in whole.splitlines():
            values = parse_line(line)
            if values is None:
                self._bad_lines += 1
            else:
                self.read.append(values)

    def problems(self) -> list[str]:
        """Return a sentence for each thing of the file that cannot be read."""
        damaged = f"{self._bad_lines} lines of {self._name} are damaged and were skipped" if self._bad_lines else ""
        return [text for text in (self.problem, damaged) if text]


def _alarm(line: str) -> dict[str, Any]:
    """Return what a line of alarms.jsonl says: a step, a name and a sentence."""
    try:
        read = json.loads(line)
    except (ValueError, RecursionError) as problem:
        return _damaged(f"this line is damaged: {one_line(problem)}")
    if not isinstance(read, dict) or type(read.get("step")) not in (int, type(None)):
        return _damaged("this line is damaged: it is no alarm of a step")
    texts = {name: str(read.get(name, "")).encode(errors="replace").decode() for name in ("alarm", "message")}
    return {"step": read.get("step"), **texts}


def _damaged(message: str) -> dict[str, Any]:
    return {"step": None, "alarm": "damaged", "message": message}


def _mask(table: pa.Table, wanted: Mapping[str, str]) -> Any:
    """Return which rows all filters let through; None if there is no filter."""
    masks = []
    for key, value in wanted.items():
        if value == "":
            continue
        kind, _, column = key.partition("_") if key.startswith(("min_", "max_")) else ("", "", key)
        if key == "errors":
            failed = pc.is_valid(table["error"])
            masks.append(pc.or_(failed, pc.fill_null(pc.greater(table["num_tool_errors"], 0), False)))
        elif key == "text":
            fields = [pc.match_substring(table[c], value, ignore_case=True) for c in ("question", "task_id", "id")]
            masks.append(pc.or_(pc.or_(*(pc.fill_null(f, False) for f in fields[:2])), pc.fill_null(fields[2], False)))
        elif kind and column in _NUMERIC:
            compare = pc.greater_equal if kind == "min" else pc.less_equal
            masks.append(pc.fill_null(compare(table[column], _as_number(key, value)), False))
        elif column in _PLAIN and not kind:
            given: Any = value if pa.types.is_string(table[column].type) else _as_number(key, value)
            masks.append(pc.fill_null(pc.equal(table[column], given), False))
        else:
            known = [*_PLAIN, "errors", "text", *(f"min_{c}" for c in _NUMERIC)]
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
        raise DataError(f"the filter {key} is {value!r}; it must be a number") from problem
