"""ParquetStore: writes the trajectories of a run to `<run>/trajectories/part-00012.parquet`, one row per trajectory.

A part is written under a temporary name and then renamed, so a crash leaves only whole parts. `schema.py` defines the
columns, and `stored_run.py` reads them back. When there are many small parts they are joined, because a reader opens every
part. When the store exceeds its size limit, the oldest training parts are deleted.
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
"""The store's folder inside a run's folder."""
ROW_GROUP = 128
"""Rows per row group, the unit that must be read to show one row."""
_MAX_BUFFERED = 16 * 2**20
"""Number of buffered tokens at which a part is written without a `flush`."""


class ParquetStore:
    """Records the trajectories of a run; usable with `with`."""

    def __init__(self, folder: Path, settings: StoreSettings | None = None, *, join_at: int = 64) -> None:
        """Open the store of the run in `folder`, keeping existing parts."""
        if settings is None:
            from polyturn.store.options import StoreSettings  # not needed by code that only reads

            settings = StoreSettings()
        self.settings = settings
        self._join_at = join_at  # number of single-flush parts at which they are joined
        self._folder = folder / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        for left_over in self._folder.glob(".*.tmp"):
            left_over.unlink(missing_ok=True)  # from a process that was killed while writing
        parts = list_parts(self._folder)
        self._next = max((part_number(p) for p in parts), default=-1) + 1
        self._small: list[Path] = []
        """Parts written by this process, one flush each, in order."""
        self._rows: list[StoredTrajectory] = []
        self._size = 0

    def add(self, group: TrajectoryGroup, *, step: int, split: str, trained: Mapping[str, Trained] | None = None) -> None:
        """Add a group of a step; it is kept in memory until `flush`.

        Args:
            group: The group.
            step: The step that used the group.
            split: "train", or "eval/<set>" for an evaluation.
            trained: Trajectory id -> its training results.
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
        """Write the groups added since the last flush as one part. Call it once per step."""
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
        """Delete the rows of steps after `step`: a resumed run repeats these steps, maybe with other groups."""
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
                logger.warning(
                    "%s keeps rows recorded after step %d, because it cannot be rewritten (%s)",
                    path,
                    step,
                    one_line(problem),
                )

    def close(self) -> None:
        """Write the remaining groups."""
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _is_kept(self, group: str) -> bool:
        share = self.settings.share
        if share >= 1.0:
            return True
        # Fowler-Noll-Vo hash: gives the same result in every process, and so after a resume.
        digest = 2166136261
        for byte in group.encode():
            digest = (digest ^ byte) * 16777619 % 2**32
        digest = (digest ^ (digest >> 15)) * 2246822519 % 2**32
        return digest / 2**32 < share

    def _write(self, path: Path, table: pa.Table) -> None:
        temporary = self._folder / f".{path.name}.tmp"
        pq.write_table(table, temporary, compression="zstd", row_group_size=ROW_GROUP)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())  # without it, a machine crash may keep the new name but lose the rows
        os.replace(temporary, path)

    def _join(self) -> None:
        """Write the small parts as one, under the number of the last one, and then delete the earlier ones.

        If the process is killed in between, some rows exist twice; readers use the later of two rows with the same key.
        """
        small, self._small = self._small, []
        try:
            table = pa.concat_tables([pq.read_table(p, schema=SCHEMA) for p in small if p.is_file()])
            self._write(small[-1], table)
        except (OSError, pa.ArrowException) as problem:
            logger.warning("the parts of %s cannot be joined and stay as they are (%s)", self._folder, one_line(problem))
            return
        for path in small[:-1]:
            path.unlink(missing_ok=True)

    def _trim(self, max_bytes: int) -> None:
        """Delete the oldest training-only parts, except the newest part, until the store is small enough."""
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
    """Write trajectories to one file with the format of a part."""
    left = iter(rows)
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as file:
        while some := list(itertools.islice(left, ROW_GROUP)):
            file.write_table(to_table(some))


def list_parts(folder: Path) -> list[Path]:
    """Return the parts of a store in the order of writing."""
    parts = [p for p in folder.glob("part-*.parquet") if p.stem.removeprefix("part-").isdecimal()]
    return sorted(parts, key=part_number)


def part_number(path: Path) -> int:
    return int(path.stem.removeprefix("part-"))


def _only_training(path: Path) -> bool:
    try:
        splits = pq.read_table(path, columns=["split"])["split"].to_pylist()
    except (OSError, pa.ArrowException):
        return False
    return all(split == "train" for split in splits)
