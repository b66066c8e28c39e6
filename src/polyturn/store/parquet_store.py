"""ParquetStore: writes the trajectories of a run to `<run>/trajectories/part-00012.parquet`, one row a trajectory.

A record must survive what made it: a part is written beside its place and moved there in one step, so a crash leaves whole
parts only. The columns are those of `schema.py`; `stored_run.py` reads them back. Small parts are joined once there are
many of them, because a reader opens every one; and the oldest training parts go once the store is larger than it may be.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from polyturn.core.errors import one_line
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.store.schema import SCHEMA, StoredTrajectory, Trained
from polyturn.store.to_rows import to_table

if TYPE_CHECKING:
    from polyturn.store.options import StoreSettings

logger = logging.getLogger(__name__)

FOLDER = "trajectories"
"""The folder in a run's folder."""
ROW_GROUP = 128
"""Rows that are read together at least, to show one."""
_MAX_BUFFERED = 16 * 2**20
"""Tokens that are held back at most before a part is written without being asked for."""


class ParquetStore:
    """Records the trajectories of a run; usable with `with`."""

    def __init__(self, folder: Path, settings: StoreSettings | None = None, *, join_at: int = 64) -> None:
        """Open the store of the run in `folder`; parts that are there already stay."""
        if settings is None:
            from polyturn.store.options import StoreSettings  # what only reads needs none

            settings = StoreSettings()
        self.settings = settings
        self._join_at = join_at  # so many parts that one flush wrote are joined to one
        self._folder = folder / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        for left_over in self._folder.glob(".*.tmp"):
            left_over.unlink(missing_ok=True)  # of a process that was killed while it wrote
        parts = list_parts(self._folder)
        self._next = max((part_number(p) for p in parts), default=-1) + 1
        self._small: list[Path] = []
        """Parts of one flush each, written by this process, in order."""
        self._rows: list[StoredTrajectory] = []
        self._size = 0

    def add(self, group: TrajectoryGroup, *, step: int, split: str, trained: Mapping[str, Trained] | None = None) -> None:
        """Record one group of a step. Held in memory until `flush`.

        Args:
            group: Its trajectories.
            step: The step that it belongs to.
            split: "train", or "eval/<set>" of an evaluation.
            trained: Trajectory id -> what training made of it.
        """
        if split == "train" and not self._is_kept(group.id):
            return
        known = trained or {}
        for trajectory in group.trajectories:
            row = StoredTrajectory(
                trajectory=trajectory, group=group.id, step=step, split=split, trained=known.get(trajectory.id, Trained())
            )
            self._rows.append(row)
            self._size += sum(len(segment) for segment in trajectory.segments)
        if self._size > _MAX_BUFFERED:
            self.flush()

    def flush(self) -> None:
        """Write what was added since the last time as one part. Call it once a step."""
        if not self._rows:
            return
        path = self._folder / f"part-{self._next:05d}.parquet"
        self._write(path, to_table(self._rows))
        self._rows, self._size, self._next = [], 0, self._next + 1
        self._small.append(path)
        if len(self._small) >= self._join_at:
            self._join()
        if self.settings.max_gb is not None:
            self._trim(round(self.settings.max_gb * 1e9))

    def forget_after(self, step: int) -> None:
        """Drop the rows of later steps, which a resumed run takes again, maybe with other groups."""
        for path in list_parts(self._folder):
            try:
                steps = pq.read_table(path, columns=["step"])["step"]
                if not len(steps) or pc.max(steps).as_py() <= step:
                    continue
                table = pq.read_table(path)
                kept = table.filter(pc.less_equal(table["step"], step))
                if kept.num_rows:
                    self._write(path, kept)
                else:
                    path.unlink()
            except (OSError, pa.ArrowException) as problem:
                logger.warning("%s keeps what was recorded after step %d (%s)", path, step, one_line(problem))

    def close(self) -> None:
        """Write what is left."""
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _is_kept(self, group: str) -> bool:
        share = self.settings.share
        if share >= 1.0:
            return True
        # Fowler-Noll-Vo: the same groups in every process, and so after a resume.
        digest = 2166136261
        for byte in group.encode():
            digest = (digest ^ byte) * 16777619 % 2**32
        digest = (digest ^ (digest >> 15)) * 2246822519 % 2**32
        return digest / 2**32 < share

    def _write(self, path: Path, table: pa.Table) -> None:
        temporary = self._folder / f".{path.name}.tmp"
        pq.write_table(table, temporary, compression="zstd", row_group_size=ROW_GROUP)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())  # or a crash of the machine may keep the new name and lose the rows
        os.replace(temporary, path)

    def _join(self) -> None:
        """Write the small parts as one, under the number of the last; those before it go afterwards.

        A kill in between leaves rows twice, and of equal rows the later one counts.
        """
        small, self._small = self._small, []
        try:
            table = pa.concat_tables([pq.read_table(p, schema=SCHEMA) for p in small if p.is_file()])
            self._write(small[-1], table)
        except (OSError, pa.ArrowException) as problem:
            logger.warning("the parts of %s stay as they are, they cannot be joined (%s)", self._folder, one_line(problem))
            return
        for path in small[:-1]:
            path.unlink(missing_ok=True)

    def _trim(self, max_bytes: int) -> None:
        """Delete the oldest parts that hold nothing but training until the store is small enough; the newest stays."""
        parts = list_parts(self._folder)
        total = sum(p.stat().st_size for p in parts)
        for path in parts[:-1]:
            if total <= max_bytes:
                return
            if _only_training(path):
                total -= path.stat().st_size
                path.unlink()
                self._small = [p for p in self._small if p != path]


def write_rows(path: Path, rows: Iterable[StoredTrajectory]) -> None:
    """Write trajectories into one file of the form that parts have."""
    left = iter(rows)
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as file:
        while some := list(itertools.islice(left, ROW_GROUP)):
            file.write_table(to_table(some))


def list_parts(folder: Path) -> list[Path]:
    """Return the parts of a store in the order they were written."""
    parts = [p for p in folder.glob("part-*.parquet") if p.stem.removeprefix("part-").isdecimal()]
    return sorted(parts, key=part_number)


def part_number(path: Path) -> int:
    """Return the number of a part."""
    return int(path.stem.removeprefix("part-"))


def _only_training(path: Path) -> bool:
    try:
        splits = pq.read_table(path, columns=["split"])["split"].to_pylist()
    except (OSError, pa.ArrowException):
        return False
    return all(split == "train" for split in splits)
