"""Trajectories in parquet: `<run>/trajectories/part-00012.parquet`, one row a trajectory.

    id         group    step  split    reward  stop_reason  num_turns  ...  payload
    "g5/2"     "g5"     12    "train"  1.0     "env_done"   3               {"id": "g5/2", "segments": [...], ...}

Separate because a record must survive what made it. A part is written beside its place and moved there in one step, so a
crash leaves whole parts only; a damaged part is skipped with a warning and costs no other one. The payload is the whole
trajectory as JSON and comes back equal, bit for bit; the other columns are for choosing without reading it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from polyturn.core.errors import DataError, did_you_mean, one_line
from polyturn.core.serde import from_json, to_json
from polyturn.core.trajectory import Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

FOLDER = "trajectories"
"""The folder in a run's folder."""

_SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "group": pa.string(),
        "step": pa.int64(),
        "split": pa.string(),
        "task_id": pa.string(),
        "data_source": pa.string(),
        "reward": pa.float64(),
        "components": pa.string(),
        "stop_reason": pa.string(),
        "error": pa.string(),
        "num_turns": pa.int32(),
        "num_sampled_tokens": pa.int64(),
        "payload": pa.large_string(),
    },
    metadata={"polyturn_store": "1"},
)
_COLUMNS = [name for name in _SCHEMA.names if name != "payload"]
_KEY = ("split", "step", "group", "id")
_MAX_BUFFERED = 128 * 2**20
"""Characters of payload that are held back at most before a part is written without being asked for."""


class ParquetStore:
    """Records the trajectories of a run; usable with `with`."""

    def __init__(self, folder: Path) -> None:
        """Open the store of the run in `folder`; parts that are there already stay."""
        self._folder = folder / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        numbers = [int(p.stem.removeprefix("part-")) for p in _parts(self._folder)]
        self._next = max(numbers, default=-1) + 1
        self._rows: list[dict[str, Any]] = []
        self._size = 0

    def add(self, group: TrajectoryGroup, *, step: int, split: str) -> None:
        """Record one group of a step; `split` is "train" or the name of an evaluation. Held in memory until `flush`."""
        rows = [_row(t, group=group.id, step=step, split=split) for t in group.trajectories]
        self._rows += rows
        self._size += sum(len(row["payload"]) for row in rows)
        if self._size > _MAX_BUFFERED:
            self.flush()

    def flush(self) -> None:
        """Write what was added since the last time as one part. Call it once a step."""
        if not self._rows:
            return
        path = self._folder / f"part-{self._next:05d}.parquet"
        temporary = self._folder / f".{path.name}.tmp"
        pq.write_table(pa.Table.from_pylist(self._rows, schema=_SCHEMA), temporary, compression="zstd")
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
        self._rows, self._size, self._next = [], 0, self._next + 1

    def close(self) -> None:
        """Write what is left."""
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class StoredRun:
    """The recorded trajectories of a run.

    A step that was taken again after a resume is recorded twice; the later record counts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._paths: list[Path] = []
        tables: list[pa.Table] = [_SCHEMA.empty_table().select(_COLUMNS)]
        where: list[tuple[int, int]] = []
        for path in _parts(folder / FOLDER):
            table = _read(path, _COLUMNS)
            if table is not None:
                where += [(len(self._paths), row) for row in range(table.num_rows)]
                self._paths.append(path)
                tables.append(table)
        everything = pa.concat_tables(tables)
        keys = list(zip(*(everything[name].to_pylist() for name in _KEY), strict=True))
        last = {key: index for index, key in enumerate(keys)}
        kept = sorted(last.values())
        self._table = everything.take(pa.array(kept, pa.int64()))
        self._where = [where[index] for index in kept]
        """(part, row in it) of each row of the table."""

    def __len__(self) -> int:
        return len(self._where)

    def table(self) -> pa.Table:
        """Return every column but the payload, in the order of recording."""
        return self._table

    def trajectory(self, id: str, step: int | None = None, split: str | None = None) -> Trajectory:
        """Return the trajectory `id`, the one recorded last where `step` and `split` leave a choice.

        Raises:
            DataError: there is none.
        """
        rows = self._select(id=id, step=step, split=split)
        if not rows:
            of = "".join(f", {name} {value!r}" for name, value in (("step", step), ("split", split)) if value is not None)
            known = pc.unique(self._table["id"]).to_pylist()
            raise DataError(f"no trajectory {id!r}{of} is recorded in {self.folder}.{did_you_mean(id, known)}")
        part, row = self._where[rows[-1]]
        payloads = _read(self._paths[part], ["payload"])
        if payloads is None:
            raise DataError(f"the trajectory {id!r} is in {self._paths[part]}, which is damaged")
        return from_json(Trajectory, json.loads(payloads["payload"][row].as_py()))

    def trajectories(self, *, step: int | None = None, split: str | None = None) -> Iterator[Trajectory]:
        """Yield every trajectory, or those of one step or split."""
        for group in self.groups(step=step, split=split):
            yield from group.trajectories

    def groups(self, *, step: int | None = None, split: str | None = None) -> Iterator[TrajectoryGroup]:
        """Yield every group, or those of one step or split, part by part."""
        by_part: dict[int, dict[tuple[Any, ...], list[int]]] = {}
        names = list(zip(*(self._table[name].to_pylist() for name in ("split", "step", "group")), strict=True))
        for index in self._select(step=step, split=split):
            part, row = self._where[index]
            by_part.setdefault(part, {}).setdefault(names[index], []).append(row)
        for part, groups in by_part.items():
            payloads = _read(self._paths[part], ["payload"])
            if payloads is None:
                continue
            for (_, _, group), rows in groups.items():
                members = tuple(from_json(Trajectory, json.loads(payloads["payload"][row].as_py())) for row in rows)
                yield TrajectoryGroup(id=group, task=members[0].task, trajectories=members)

    def _select(self, **wanted: Any) -> list[int]:
        """Return the indices of the rows whose columns have these values; None leaves a column open."""
        mask = pa.array([True] * len(self), pa.bool_())
        for name, value in wanted.items():
            if value is not None:
                mask = pc.and_(mask, pc.equal(self._table[name], value))
        return [index for index, is_chosen in enumerate(mask.to_pylist()) if is_chosen]


def open_store(run_folder: Path) -> StoredRun:
    """Open the recorded trajectories of the run in `run_folder`.

    Raises:
        DataError: the run recorded none.
    """
    folder = run_folder / FOLDER
    if not folder.is_dir():
        inside = sorted(p.name for p in run_folder.iterdir()) if run_folder.is_dir() else "nothing, it does not exist"
        raise DataError(f"{str(run_folder)!r} holds no recorded trajectories ({FOLDER}/); it holds {inside}")
    return StoredRun(run_folder)


def _row(trajectory: Trajectory, *, group: str, step: int, split: str) -> dict[str, Any]:
    reward = trajectory.reward
    return {
        "id": trajectory.id,
        "group": group,
        "step": step,
        "split": split,
        "task_id": trajectory.task.id,
        "data_source": trajectory.task.data_source,
        "reward": None if reward is None else float(reward.total),
        "components": json.dumps(to_json(reward.components)) if reward is not None else None,
        "stop_reason": trajectory.stop_reason.value,
        "error": trajectory.error,
        "num_turns": len(trajectory.turns),
        "num_sampled_tokens": trajectory.num_sampled_tokens,
        "payload": json.dumps(to_json(trajectory), separators=(",", ":")),
    }


def _parts(folder: Path) -> list[Path]:
    """Return the parts of a store in the order they were written."""
    found = [p for p in folder.glob("part-*.parquet") if p.stem.removeprefix("part-").isdigit()]
    return sorted(found, key=lambda p: int(p.stem.removeprefix("part-")))


def _read(path: Path, columns: list[str]) -> pa.Table | None:
    try:
        return pq.read_table(path, columns=columns).select(columns)
    except (pa.ArrowException, OSError, KeyError) as problem:
        logger.warning("%s is damaged and was skipped (%s); the other parts are not affected", path, one_line(problem))
        return None
