"""StoredRun: the recorded trajectories of a run, while it goes on and after.

    run = open_store("runs/quickstart")               polyturn.Run("runs/quickstart") adds its configuration and weights
    run.table()                                       one row a trajectory, an Arrow table
    run.filter("reward < 1 and num_tool_errors > 0")  the same, narrowed; conditions are DuckDB's SQL
    run.trajectory("g5/2")                            one, equal to what was recorded

The table of choosing columns is held in memory and grows by `refresh`, which reads new parts only; tokens and text are read
from the files when they are asked for. A damaged part is skipped with a warning and costs no other one. A step that was
taken again after a resume is recorded twice; the later record counts.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from polyturn.core.contained import contained
from polyturn.core.errors import ConfigError, DataError, did_you_mean, one_line
from polyturn.core.metrics_file import read_metrics
from polyturn.core.reward import brief
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.store.from_rows import UNREADABLE, read_rows
from polyturn.store.parquet_store import FOLDER, list_parts
from polyturn.store.part_file import PartFile
from polyturn.store.schema import INDEX_COLUMNS, KEY, SCHEMA, StoredTrajectory, upgrade
from polyturn.store.sql import run_query
from polyturn.store.table import RowTable
from polyturn.store.text_search import TextQuery, TextSearch

logger = logging.getLogger(__name__)

T = TypeVar("T")
Rows = NDArray[np.int64]
_Stamp = tuple[int, int]
_PART, _ROW, _AT = "__part", "__row", "__at"
MAX_LISTED = 5_000_000
"""Rows of all parts together that are listed."""
SHOWN_METRICS = (
    "step", "reward/mean", "rollout/success", "rollout/turns", "rollout/tool_errors", "loss/total", "policy/entropy",
    "eval/greedy/success", "time/step_s",
)  # fmt: skip
"""Columns of the metrics that a page has room for."""
SHOWN_COLUMNS = ("id", "step", "split", "reward", "num_turns", "stop_reason", "error")


class Trajectories:
    """The trajectories of a stored run: each is read when it is asked for."""

    def __init__(self, run: StoredRun) -> None:
        self._run = run

    def __call__(self, *, step: int | None = None, split: str | None = None) -> Iterator[Trajectory]:
        """Yield every trajectory, or those of one step or split."""
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
        """Return a trajectory by its id, or by its number in the order of recording; of a slice of numbers, a list.

        Raises:
            DataError: there is none, or `key` is neither.
        """
        if isinstance(key, str):
            return self._run.trajectory(key)
        if isinstance(key, slice):
            return [self[number] for number in range(len(self))[key]]
        if not isinstance(key, int) or not -len(self) <= key < len(self):
            raise DataError(f"there is no trajectory {brief(key)}; give an id, as 'g5/2', or a number below {len(self)}")
        row = self._run.table(["id", "step", "split"]).slice(key % len(self), 1).to_pylist()[0]
        return self._run.trajectory(**row)

    def __repr__(self) -> str:
        return f"{len(self)} trajectories of {str(self._run.folder)!r}"

    def _repr_html_(self) -> str:
        return self._run._repr_html_()


class StoredRun:
    """The recorded trajectories of one run."""

    def __init__(self, folder: Path) -> None:
        """Read the choosing columns of every part in `folder`, the folder of a run."""
        self.folder = folder
        self.problems: dict[str, str] = {}
        """Part, or a row of one, -> why it cannot be read."""
        self._parts: dict[str, pa.Table] = {}
        self._stamps: dict[str, _Stamp] = {}
        self._num_listed = 0
        self._search = TextSearch(self._try)
        self._table = self._joined()
        self.refresh()

    def refresh(self) -> bool:
        """Read what was written since the last time; return whether anything was."""
        stamps = {}
        for path in list_parts(self.folder / FOLDER):
            with contextlib.suppress(FileNotFoundError):  # joined with others since it was listed
                about = path.stat()
                stamps[path.name] = (about.st_mtime_ns, about.st_size)
        if stamps == self._stamps:
            return False
        same = [name for name, stamp in stamps.items() if self._stamps.get(name) == stamp]
        kept = {name: self._parts[name] for name in same if name in self._parts}
        self._num_listed = sum(table.num_rows for table in kept.values())
        for name in stamps:
            if name not in kept and (table := self._read_index(name)) is not None:
                kept[name] = table
        self._parts = {name: kept[name] for name in stamps if name in kept}
        self._search.keep(same)
        self._stamps = stamps
        self.problems = {name: why for name, why in self.problems.items() if name.partition(",")[0] in stamps}
        self._table = self._joined()
        return True

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the choosing columns, or some of them, in the order of recording."""
        return self._table.select(list(columns or INDEX_COLUMNS))

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
        """Return the rows for which `condition`, an SQL condition over the columns of `table()`, holds.

        Args:
            condition: The condition.
            stop: Ends it when it is set.

        Raises:
            DataError: the condition is not valid, or takes too much time or memory; the message says what.
            ConfigError: DuckDB is not installed.
        """
        if not isinstance(condition, str):
            raise DataError(f"condition is {brief(condition)}; write one over columns of table(): run.filter('reward < 1')")
        numbered = self.table().append_column(_AT, pa.array(np.arange(len(self))))
        rows = run_query(numbered, f"select {_AT} from trajectories where ({condition})", stop=stop)
        if rows.column_names != [_AT] or not pa.types.is_integer(rows[_AT].type):
            raise DataError(f"{condition!r:.200} is not a condition over the columns of a trajectory")
        chosen = np.isin(np.arange(len(self)), rows[_AT].drop_null().to_numpy())
        return self._narrowed(self._table.filter(pa.array(chosen)))

    def search(self, text: str, *, is_expression: bool = False, stop: threading.Event | None = None) -> StoredRun:
        """Return the rows whose id or task holds each word of `text`, or whose messages, tool calls or results do.

        Args:
            text: Words, each of which is found anywhere, in upper or lower case; or a regular expression (RE2's).
            is_expression: Whether it is an expression, which one text has to match.
            stop: Ends it when it is set.

        Raises:
            DataError: it is too long, no expression, or took too long.
        """
        query = TextQuery(text=text, is_expression=is_expression, stop=stop)
        query.check()
        names = self._table[_PART].combine_chunks().dictionary_encode()
        which, rows = names.indices.to_numpy(), self._table[_ROW].to_numpy()
        holds_all = np.ones(len(self), np.bool_)
        for pattern in query.patterns:
            holds = np.zeros(len(self), np.bool_)
            for column in ("id", "task_id"):
                holds |= query.matches(self._table[column].combine_chunks(), pattern)
            for number, part in enumerate(names.dictionary.to_pylist()):
                mine = which == number
                holds[mine] |= np.isin(rows[mine], self._search.rows(part, pattern, query))
            holds_all &= holds
        return self._narrowed(self._table.filter(pa.array(holds_all)))

    def scan(self, read: Callable[[PartFile], T], cache: dict[tuple[str, _Stamp], T]) -> Iterator[tuple[pa.Table, Rows, T]]:
        """Yield for each part its rows of `table()`, their numbers [N] in the part, and what `read` gives of its file.

        Args:
            read: Reads columns that are in no table, such as arrays over tokens.
            cache: Keeps what `read` gave, so that the next time only new parts are read.
        """
        for old in [key for key in cache if self._stamps.get(key[0]) != key[1]]:
            del cache[old]
        for key in self._stamps.items():
            if key not in cache and (value := self._try(key[0], lambda path: read(PartFile(path)))) is not None:
                cache[key] = value
            if key in cache:
                table = self._table.filter(pc.equal(self._table[_PART], key[0]))
                yield table, table[_ROW].to_numpy(), cache[key]

    def sql(self, query: str, *, stop: threading.Event | None = None) -> pa.Table:
        """Run an SQL query over the table `trajectories` (the columns of `table()`) and return its result.

        Raises:
            DataError: the query is not valid, or takes too much time or memory.
            ConfigError: DuckDB is not installed.
        """
        return run_query(self.table(), query, stop=stop)

    def select(self, *, step: int | None = None, split: str | None = None, **equal: Any) -> StoredRun:
        """Return the rows whose columns have these values; None leaves a column open."""
        return self._narrowed(self._table.filter(self._mask(step=step, split=split, **equal)))

    def keep(self, mask: pa.Array) -> StoredRun:
        """Return the rows where `mask`, one value a row of `table()`, is true."""
        return self._narrowed(self._table.filter(mask))

    def trajectory(self, id: str, step: int | None = None, split: str | None = None) -> Trajectory:
        """Return the trajectory `id`, the one recorded last where `step` and `split` leave a choice.

        Raises:
            DataError: there is none.
        """
        return self.record(id, step=step, split=split).trajectory

    def record(self, id: str, *, step: int | None = None, split: str | None = None) -> StoredTrajectory:
        """Return the trajectory `id` with its place in the run and what training made of it.

        Raises:
            DataError: there is none.
        """
        rows = self._table.filter(self._mask(id=id, step=step, split=split))
        if not rows.num_rows:
            of = "".join(
                f", {name} {brief(value)}" for name, value in (("step", step), ("split", split)) if value is not None
            )
            known = pc.unique(self._table["id"]).to_pylist()
            raise DataError(f"no trajectory {brief(id)}{of} is recorded in {self.folder}.{did_you_mean(id, known)}")
        last = rows.slice(rows.num_rows - 1)
        part = last[_PART][0].as_py()
        records = self._read_rows(part, [last[_ROW][0].as_py()])
        if not records:
            row = f"{part}, row {last[_ROW][0].as_py()}"
            source = row if row in self.problems else part
            where = self.folder / FOLDER / source
            raise DataError(f"the trajectory {id!r} is in {where}, which cannot be read: {self.problems.get(source)}")
        return records[0]

    def records(self) -> Iterator[StoredTrajectory]:
        """Yield every trajectory with its place in the run, part by part."""
        for part, rows in self._by_part():
            yield from self._read_rows(part, rows)

    @property
    def trajectories(self) -> Trajectories:
        """Every trajectory: `for t in run.trajectories`, `run.trajectories["g5/2"]`, `run.trajectories[-1]`; of one step or
        split, `run.trajectories(step=3)`."""
        return Trajectories(self)

    @property
    def metrics(self) -> RowTable:
        """One row a step, evaluations included; empty where the run wrote none."""
        path = self.folder / "metrics.jsonl"
        return RowTable(read_metrics(path) if path.exists() else (), columns=SHOWN_METRICS)

    def _repr_html_(self) -> str:
        rows = [{name: row[name] for name in SHOWN_COLUMNS} for row in self._table.slice(max(0, len(self) - 8)).to_pylist()]
        return f"<p>{len(self)} trajectories; the last:</p>" + RowTable(rows)._repr_html_()

    def groups(self, *, step: int | None = None, split: str | None = None) -> Iterator[TrajectoryGroup]:
        """Yield every group, or those of one step or split, part by part."""
        chosen = self.select(step=step, split=split)
        for part, rows in chosen._by_part():
            groups: dict[tuple[str, int, str], list[Trajectory]] = {}
            for record in self._read_rows(part, rows):
                groups.setdefault((record.split, record.step, record.group), []).append(record.trajectory)
            for (_, _, group), members in groups.items():
                yield TrajectoryGroup(id=group, task=members[0].task, trajectories=tuple(members))

    def _narrowed(self, table: pa.Table) -> StoredRun:
        other = copy.copy(self)
        other._parts, other._table = {}, table
        return other

    def _mask(self, **wanted: Any) -> pa.Array:
        mask = pa.array(np.ones(len(self), np.bool_))
        for name, value in wanted.items():
            if name not in INDEX_COLUMNS:
                raise DataError(f"there is no column {name!r}.{did_you_mean(name, INDEX_COLUMNS)}")
            if isinstance(value, int):
                value = max(-(2**63), min(value, 2**63 - 1))  # Arrow compares no number that its own have no room for
            if value is not None:
                mask = pc.and_(mask, pc.fill_null(pc.equal(self._table[name], value), False))
        return mask

    def _by_part(self) -> Iterator[tuple[str, list[int]]]:
        places: dict[str, list[int]] = {}
        for part, row in zip(self._table[_PART].to_pylist(), self._table[_ROW].to_pylist(), strict=True):
            places.setdefault(part, []).append(row)
        yield from places.items()

    def _joined(self) -> pa.Table:
        """Join the parts' tables; of rows that were recorded twice the later one stays."""
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
                raise DataError(f"the parts before it have {self._num_listed} rows, and {MAX_LISTED} are listed at most")
            present = set(file.schema.names)
            table = upgrade(file.read([c for c in INDEX_COLUMNS if c in present]))
            self._num_listed += table.num_rows
            places = {_PART: pa.array([name] * table.num_rows, pa.string()), _ROW: pa.array(np.arange(table.num_rows))}
            for column, values in places.items():
                table = table.append_column(column, values)
            return table.cast(_LISTED)

        return self._try(name, read)

    def _read_rows(self, part: str, rows: Sequence[int]) -> list[StoredTrajectory]:
        """Return rows of one part, in this order, without those that are damaged; nothing where the part is."""

        def damaged(row: int, problem: Exception) -> None:
            self._note(f"{part}, row {row}", one_line(problem))

        if not (self.folder / FOLDER / part).exists():  # joined with others since it was listed
            return self._read_moved(part, rows)
        return self._try(part, lambda path: read_rows(PartFile(path), rows, damaged=damaged)) or []

    def _read_moved(self, part: str, rows: Sequence[int]) -> list[StoredTrajectory]:
        """Return rows of a part that is gone, from where they are now."""
        mine = self._table.filter(pc.equal(self._table[_PART], part)).to_pylist()
        key_of = {row[_ROW]: tuple(row[name] for name in KEY) for row in mine}
        now = StoredRun(self.folder)
        places = {tuple(row[name] for name in KEY): row for row in now._table.to_pylist()}
        here = [location for row in rows if (location := places.get(key_of[row])) is not None and location[_PART] != part]
        return [record for location in here for record in now._read_rows(location[_PART], [location[_ROW]])]

    def _try(self, name: str, read: Callable[[Path], Any]) -> Any:
        try:
            path = contained(self.folder, f"{FOLDER}/{name}")
            return None if path is None else read(path)  # None: joined with others since it was listed
        except FileNotFoundError:
            return None
        except UNREADABLE as problem:
            self._note(name, one_line(problem))
            return None

    def _note(self, name: str, why: str) -> None:
        if name not in self.problems:
            logger.warning("%s is damaged and was skipped (%s); nothing else is affected", self.folder / FOLDER / name, why)
        self.problems[name] = why


_LISTED = pa.schema([*(SCHEMA.field(name) for name in INDEX_COLUMNS), (_PART, pa.string()), (_ROW, pa.int64())])


def open_store(run_folder: str | Path) -> StoredRun:
    """Open the recorded trajectories of the run in `run_folder`.

    Raises:
        DataError: the run recorded none.
    """
    run_folder = Path(run_folder)
    if not run_folder.is_dir():
        raise DataError(f"there is no folder {str(run_folder)!r}; name the folder of a run, for instance runs/NAME")
    if not (run_folder / FOLDER).is_dir():
        inside = ", ".join(sorted(p.name for p in run_folder.iterdir()))
        raise DataError(
            f"{str(run_folder)!r} holds no recorded trajectories (there is no {FOLDER}/ in it); name the folder of a run. "
            + (f"It holds {inside}" if inside else "It is empty")
        )
    return StoredRun(run_folder)
