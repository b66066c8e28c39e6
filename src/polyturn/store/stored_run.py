"""StoredRun: the recorded trajectories of a run, during the run and afterwards.

    run = open_store("runs/quickstart")               polyturn.Run("runs/quickstart") adds its configuration and weights
    run.table()                                       an Arrow table with one row per trajectory
    run.filter("reward < 1 and num_tool_errors > 0")  a StoredRun with fewer rows; conditions are DuckDB's SQL
    run.trajectory("g5/2")                            one trajectory, equal to the recorded one

The table of index columns is kept in memory and extended by `refresh`, which reads new parts only. Tokens and texts are read
from the files on access. A damaged part is skipped with a warning; other parts are not affected. A step that was repeated
after a resume is recorded twice; the later record counts.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from polyturn.core.errors import ConfigError, DataError, did_you_mean, one_line
from polyturn.core.reward import brief
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.infra.contained import contained
from polyturn.infra.metrics_file import read_metrics
from polyturn.store.from_rows import UNREADABLE, read_rows
from polyturn.store.parquet_store import FOLDER, list_parts
from polyturn.store.part_file import PartFile
from polyturn.store.run_folders import is_run
from polyturn.store.schema import INDEX_COLUMNS, KEY, SCHEMA, StoredTrajectory
from polyturn.store.sql import run_query
from polyturn.store.table import RowTable
from polyturn.store.text_search import TextQuery, TextSearch

logger = logging.getLogger(__name__)

T = TypeVar("T")
Rows = NDArray[np.int64]
_Stamp = tuple[int, int]
_PART, _ROW, _AT = "__part", "__row", "__at"
MAX_LISTED = 5_000_000
"""Largest number of rows to list, over all parts."""
SHOWN_METRICS = (
    "step", "reward/mean", "rollout/success", "rollout/turns", "rollout/tool_errors", "loss/total", "policy/entropy",
    "eval/greedy/success", "time/step_s",
)  # fmt: skip
"""Columns of the metrics to show."""
SHOWN_COLUMNS = ("id", "step", "split", "reward", "num_turns", "stop_reason", "error")


class Trajectories:
    """The trajectories of a stored run; each is read on access."""

    def __init__(self, run: StoredRun) -> None:
        self._run = run

    def __call__(self, *, step: int | None = None, split: str | None = None) -> Iterator[Trajectory]:
        """Yield all trajectories, or only the trajectories of one step or split."""
        for record in self._run.select(step=step, split=split).records():
            yield record.trajectory

    def __iter__(self) -> Iterator[Trajectory]:
        return self()

    def __len__(self) -> int:
        return len(self._run)

    @overload
    def __getitem__(self, key: str | int) -> Trajectory: ...
    @overload
    def __getitem__(self, key: slice) -> list[Trajectory]: ...
    def __getitem__(self, key: str | int | slice) -> Trajectory | list[Trajectory]:
        """Return a trajectory by id or by its number in the order of recording, or a list for a slice of numbers.

        Raises:
            DataError: there is no such trajectory, or `key` has another type.
        """
        if isinstance(key, str):
            return self._run.trajectory(key)
        if isinstance(key, slice):
            return [self[number] for number in range(len(self))[key]]
        if not isinstance(key, int) or not -len(self) <= key < len(self):
            known = f"use an id such as 'g5/2', or a number below {len(self)}" if len(self) else "the run has none yet"
            raise DataError(f"there is no trajectory {brief(key)}; {known}")
        row = self._run.table(["id", "step", "split"]).slice(key % len(self), 1).to_pylist()[0]
        return self._run.trajectory(**row)

    def __repr__(self) -> str:
        return f"{len(self)} trajectories of {str(self._run.folder)!r}"

    def _repr_html_(self) -> str:
        return self._run._repr_html_()


class StoredRun:
    """The recorded trajectories of one run."""

    def __init__(self, folder: Path) -> None:
        """Read the index columns of every part in `folder`, the folder of a run."""
        self.folder = folder
        self.problems: dict[str, str] = {}
        """Part, or row of a part -> why it cannot be read."""
        self._parts: dict[str, pa.Table] = {}
        self._stamps: dict[str, _Stamp] = {}
        self._num_listed = 0
        self._search = TextSearch(self._try)
        self._lock = threading.Lock()  # of `_table` and `_stamps`, which belong together
        self._table = self._joined()
        self.refresh()

    def refresh(self) -> bool:
        """Read parts that have changed since the last call; return whether there were any."""
        with self._lock:
            return self._refresh()

    def snapshot(self) -> StoredRun:
        """Return a run with the same rows, which does not change when another thread calls `refresh`."""
        with self._lock:
            return self._narrowed(self._table)

    def _refresh(self) -> bool:
        listed = {path.name: _stamp(path) for path in list_parts(self.folder / FOLDER)}
        stamps = {name: stamp for name, stamp in listed.items() if stamp is not None}
        if stamps == self._stamps:
            return False
        same = [name for name, stamp in stamps.items() if self._stamps.get(name) == stamp]
        kept = {name: self._parts[name] for name in same if name in self._parts}
        self._num_listed = sum(table.num_rows for table in kept.values())
        for name in stamps:
            if name not in kept and (table := self._read_index(name)) is not None:
                kept[name] = table
        self._parts = {name: kept[name] for name in stamps if name in kept}
        self._search.keep(stamps.items())
        problems = dict(self.problems)  # a copy, because snapshots in other threads may add to them meanwhile
        self.problems = {name: why for name, why in problems.items() if name.partition(",")[0] in stamps}
        self._table = self._joined()
        self._stamps = stamps
        return True

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the index columns, or some of them, in the order of recording.

        Raises:
            DataError: there is no such column.
        """
        chosen = list(columns or INDEX_COLUMNS)
        _require_columns(chosen)
        return self._table.select(chosen)

    def to_pandas(self) -> Any:
        """Return `table()` as a pandas frame.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            return self.table().to_pandas()
        except ModuleNotFoundError as problem:
            raise ConfigError("pandas is not installed; pip install pandas, or use table()") from problem

    def filter(self, condition: str, *, stop: threading.Event | None = None) -> StoredRun:
        """Return the rows that satisfy an SQL condition over the columns of `table()`.

        Args:
            condition: The condition.
            stop: Ends the query when set.

        Raises:
            DataError: the condition is invalid, or needs too much time or memory.
            ConfigError: DuckDB is not installed.
        """
        if not isinstance(condition, str):
            raise DataError(f"condition is {brief(condition)}; use columns of table(): run.filter('reward < 1')")
        numbered = self.table().append_column(_AT, pa.array(np.arange(len(self))))
        rows = run_query(numbered, f"select {_AT} from trajectories where ({condition})", stop=stop)
        if rows.column_names != [_AT] or not pa.types.is_integer(rows[_AT].type):
            raise DataError(f"{condition!r:.200} is not a condition over the columns of a trajectory")
        chosen = np.isin(np.arange(len(self)), rows[_AT].drop_null().to_numpy())
        return self._narrowed(self._table.filter(pa.array(chosen)))

    def search(self, text: str, *, is_expression: bool = False, stop: threading.Event | None = None) -> StoredRun:
        """Return the rows with matches in their id, task id, messages, reasoning, tool calls or tool results.

        Args:
            text: Words, each of which must occur in one of these texts; or a regular expression of RE2. Case is ignored.
            is_expression: Whether `text` is a regular expression, which one text must match.
            stop: Ends the search when set.

        Raises:
            DataError: `text` is too long or not a valid expression, or the search took too long.
        """
        query = TextQuery(text=text, is_expression=is_expression, stop=stop)
        query.check()
        now = self._located()
        names = now._table[_PART].combine_chunks().dictionary_encode()
        which, rows = names.indices.to_numpy(), now._table[_ROW].to_numpy()
        holds_all = np.ones(len(now), np.bool_)
        for pattern in query.patterns:
            holds = np.zeros(len(now), np.bool_)
            for column in ("id", "task_id"):
                holds |= query.matches(now._table[column].combine_chunks(), pattern)
            for number, part in enumerate(names.dictionary.to_pylist()):
                mine = which == number
                holds[mine] |= np.isin(rows[mine], now._search.rows((part, now._stamps[part]), pattern, query))
            holds_all &= holds
        return now._narrowed(now._table.filter(pa.array(holds_all)))

    def scan(self, read: Callable[[PartFile], T], cache: dict[tuple[str, _Stamp], T]) -> Iterator[tuple[pa.Table, Rows, T]]:
        """Yield for each part its rows of `table()`, their numbers [N] in the part, and the result of `read` on its file.

        Args:
            read: Reads columns that are not in the table, such as arrays over tokens.
            cache: Keeps the results of `read`, so that the next scan reads only new parts.
        """
        now = self._located()
        for old in [key for key in list(cache) if now._stamps.get(key[0]) != key[1]]:
            cache.pop(old, None)  # another thread may have removed it
        for key in now._stamps.items():
            if key not in cache and (value := now._try(key[0], lambda path: read(PartFile(path)))) is not None:
                cache[key] = value
            if key in cache:
                table = now._table.filter(pc.equal(now._table[_PART], key[0]))
                yield table, table[_ROW].to_numpy(), cache[key]

    def sql(self, query: str, *, stop: threading.Event | None = None) -> pa.Table:
        """Run an SQL query over the table `trajectories` (the columns of `table()`) and return its result.

        Raises:
            DataError: the query is invalid, or needs too much time or memory.
            ConfigError: DuckDB is not installed.
        """
        return run_query(self.table(), query, stop=stop)

    def select(self, *, step: int | None = None, split: str | None = None, **equal: Any) -> StoredRun:
        """Return the rows whose columns have these values; None matches any value."""
        return self._narrowed(self._table.filter(self._mask(step=step, split=split, **equal)))

    def keep(self, mask: pa.Array) -> StoredRun:
        """Return the rows where `mask`, one value per row of `table()`, is true."""
        return self._narrowed(self._table.filter(mask))

    def trajectory(self, id: str, step: int | None = None, split: str | None = None) -> Trajectory:
        """Return the trajectory `id`; if several match `step` and `split`, the one recorded last.

        Raises:
            DataError: there is no such trajectory.
        """
        return self.record(id, step=step, split=split).trajectory

    def record(self, id: str, *, step: int | None = None, split: str | None = None) -> StoredTrajectory:
        """Return the trajectory `id` with its position in the run and its training results.

        Raises:
            DataError: there is no such trajectory.
        """
        rows = self._table.filter(self._mask(id=id, step=step, split=split))
        if not rows.num_rows:
            of = "".join(
                f", {name} {brief(value)}" for name, value in (("step", step), ("split", split)) if value is not None
            )
            places = self._table.filter(self._mask(id=id, step=None, split=None)).select(["step", "split"]).to_pylist()
            if places:
                known = ", ".join(f"step {one['step']}, split {one['split']}" for one in places[:4])
                hint = f" It is recorded for {known}."
            else:
                hint = did_you_mean(id, pc.unique(self._table["id"]).to_pylist())
            raise DataError(f"no trajectory {brief(id)}{of} is recorded in {self.folder}.{hint}")
        last = rows.slice(rows.num_rows - 1)
        part = last[_PART][0].as_py()
        records = self._read_rows(part, [last[_ROW][0].as_py()])
        if not records:
            row = f"{part}, row {last[_ROW][0].as_py()}"
            source = row if row in self.problems else part
            where = self.folder / FOLDER / source
            why = self.problems.get(source, "it was deleted, or written again without this trajectory")
            raise DataError(f"the trajectory {id!r} is in {where}, which cannot be read: {why}")
        return records[0]

    def records(self) -> Iterator[StoredTrajectory]:
        """Yield every trajectory with its position in the run, part by part."""
        now = self._located()
        for part, rows in now._by_part():
            yield from now._read_rows(part, rows)

    @property
    def trajectories(self) -> Trajectories:
        """All trajectories: `for t in run.trajectories`, `run.trajectories["g5/2"]`, `run.trajectories[-1]`, and
        `run.trajectories(step=3)` for one step or split."""
        return Trajectories(self)

    @property
    def metrics(self) -> RowTable:
        """The metrics, one row per step, including evaluations; empty if the run wrote none."""
        path = self.folder / "metrics.jsonl"
        return RowTable(read_metrics(path) if path.exists() else (), columns=SHOWN_METRICS)

    def _repr_html_(self) -> str:
        rows = [{name: row[name] for name in SHOWN_COLUMNS} for row in self._table.slice(max(0, len(self) - 8)).to_pylist()]
        return f"<p>{len(self)} trajectories; the last:</p>" + RowTable(rows)._repr_html_()

    def groups(self, *, step: int | None = None, split: str | None = None) -> Iterator[TrajectoryGroup]:
        """Yield all groups, or only the groups of one step or split, part by part."""
        chosen = self.select(step=step, split=split)._located()
        for part, rows in chosen._by_part():
            groups: dict[tuple[str, int, str], list[Trajectory]] = {}
            for record in chosen._read_rows(part, rows):
                groups.setdefault((record.split, record.step, record.group), []).append(record.trajectory)
            for (_, _, group), members in groups.items():
                yield TrajectoryGroup(id=group, task=members[0].task, trajectories=tuple(members))

    def _narrowed(self, table: pa.Table) -> StoredRun:
        other = copy.copy(self)
        other._parts, other._table = {}, table
        return other

    def _mask(self, **wanted: Any) -> pa.Array:
        mask = pa.array(np.ones(len(self), np.bool_))
        _require_columns(wanted)
        for name, value in wanted.items():
            if isinstance(value, int):
                value = max(-(2**63), min(value, 2**63 - 1))  # Arrow cannot compare with integers beyond 64 bits
            if value is not None:
                mask = pc.and_(mask, pc.fill_null(pc.equal(self._table[name], value), False))
        return mask

    def _by_part(self) -> Iterator[tuple[str, list[int]]]:
        rows_of_part: dict[str, list[int]] = {}
        for part, row in zip(self._table[_PART].to_pylist(), self._table[_ROW].to_pylist(), strict=True):
            rows_of_part.setdefault(part, []).append(row)
        yield from rows_of_part.items()

    def _joined(self) -> pa.Table:
        """Return the parts' tables as one; of rows recorded twice, only the later one is kept."""
        tables = [_LISTED.empty_table(), *self._parts.values()]
        everything = pa.concat_tables(tables).combine_chunks()
        numbered = everything.select(KEY).append_column("at", pa.array(np.arange(everything.num_rows)))
        last = numbered.group_by(KEY).aggregate([("at", "max")])["at_max"]
        if len(last) == everything.num_rows:
            return everything
        return everything.take(pa.array(np.sort(last.to_numpy())))

    def _read_index(self, name: str) -> pa.Table | None:
        def read(path: Path) -> pa.Table:
            file = PartFile(path)
            if self._num_listed + file.num_rows > MAX_LISTED:
                raise DataError(f"earlier parts have {self._num_listed} rows; at most {MAX_LISTED} can be listed")
            table = file.read(INDEX_COLUMNS)
            self._num_listed += table.num_rows
            columns = {_PART: pa.array([name] * table.num_rows, pa.string()), _ROW: pa.array(np.arange(table.num_rows))}
            for column, values in columns.items():
                table = table.append_column(column, values)
            return table.cast(_LISTED)

        return self._try(name, read)

    def _read_rows(self, part: str, rows: Sequence[int]) -> list[StoredTrajectory]:
        """Return rows of one part in the given order, without damaged rows; empty if the whole part is damaged."""

        def damaged(row: int, problem: Exception) -> None:
            self._note(f"{part}, row {row}", one_line(problem))

        if _stamp(self.folder / FOLDER / part) != self._stamps.get(part):
            chosen = pc.and_(pc.equal(self._table[_PART], part), pc.is_in(self._table[_ROW], pa.array(rows)))
            return list(self.keep(chosen).records())
        return self._try(part, lambda path: read_rows(PartFile(path), rows, damaged=damaged)) or []

    def _located(self) -> StoredRun:
        """Return the same rows, looked up again if parts have been joined or written again since they were listed; rows
        that no part contains any more are left out."""
        parts = pc.unique(self._table[_PART]).to_pylist()
        if all(_stamp(self.folder / FOLDER / part) == self._stamps.get(part) for part in parts):
            return self
        now = StoredRun(self.folder)
        self.problems.update(now.problems)
        now.problems = self.problems
        mine = set(_keys(self._table))
        return now.keep(pa.array([key in mine for key in _keys(now._table)], pa.bool_()))

    def _try(self, name: str, read: Callable[[Path], Any]) -> Any:
        try:
            path = contained(self.folder, f"{FOLDER}/{name}")
            return None if path is None else read(path)  # None: the part has been joined with others since it was listed
        except FileNotFoundError:
            return None
        except UNREADABLE as problem:
            self._note(name, one_line(problem))
            return None

    def _note(self, name: str, why: str) -> None:
        if name not in self.problems:
            logger.warning("%s cannot be read and is skipped (%s); the rest is shown", self.folder / FOLDER / name, why)
        self.problems[name] = why


def _keys(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    return zip(*(table[name].to_pylist() for name in KEY), strict=True)


def _require_columns(names: Iterable[str]) -> None:
    for name in names:
        if name not in INDEX_COLUMNS:
            raise DataError(f"there is no column {name!r}.{did_you_mean(str(name), INDEX_COLUMNS)}")


def _stamp(path: Path) -> _Stamp | None:
    """Return the time and size of a part, which change if it is written again; None if there is no such file."""
    try:
        about = path.stat()
    except FileNotFoundError:
        return None
    return about.st_mtime_ns, about.st_size


_LISTED = pa.schema([*(SCHEMA.field(name) for name in INDEX_COLUMNS), (_PART, pa.string()), (_ROW, pa.int64())])


def open_store(run_folder: str | Path) -> StoredRun:
    """Open the recorded trajectories of the run in `run_folder`.

    Raises:
        DataError: the run recorded no trajectories.
    """
    run_folder = Path(run_folder)
    if not run_folder.is_dir():
        raise DataError(f"there is no folder {str(run_folder)!r}; use the folder of a run, for instance runs/NAME")
    if not (run_folder / FOLDER).is_dir():
        inside = ", ".join(sorted(p.name for p in run_folder.iterdir()))
        is_new = is_run(run_folder)
        advice = "if it has just started, they appear with its first step" if is_new else "use the folder of a run"
        raise DataError(
            f"{str(run_folder)!r} has no recorded trajectories (no {FOLDER}/); {advice}. "
            + (f"It contains {inside}" if inside else "It is empty")
        )
    return StoredRun(run_folder)
