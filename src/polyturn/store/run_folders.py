"""Finds the folders of runs, without reading their configurations.

runs/quickstart/     has metrics.jsonl, trajectories/, or a config.yaml written by a run
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from polyturn.core.errors import DataError
from polyturn.infra.contained import contained

logger = logging.getLogger(__name__)

RESOLVED_HEAD = (
    "# Everything this run used, defaults included. ${oc.env:...} is read from the environment and never written.\n"
)
"""The first line of a configuration written by a run; a user's configuration does not have it."""


def find_runs(folders: Sequence[Path], *, warns: bool = True) -> list[Path]:
    """Return the folders that are runs, and the runs inside each other folder, newest first.

    Args:
        folders: Folders of runs, or that contain runs.
        warns: Whether to log a warning for each folder inside them that this user may not read.

    Raises:
        DataError: a folder does not exist, or is neither a run nor contains one.
        PermissionError: this user may not read one of `folders`.
    """
    runs: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise DataError(f"there is no folder {str(folder)!r}; use a run's folder, or a folder of runs")
        if is_run(folder):
            runs.append(folder)
            continue
        inside = _runs_in(folder, warns) or (_runs_in(folder / "runs", warns) if (folder / "runs").is_dir() else [])
        if not inside:
            raise DataError(
                f"there is no run in {str(folder)!r}: a run's folder has metrics.jsonl, trajectories/ or a config.yaml "
                "written by polyturn"
            )
        runs += inside
    return list(dict.fromkeys(runs))


def _runs_in(folder: Path, warns: bool) -> list[Path]:
    runs = []
    for path in folder.iterdir():
        try:
            if path.is_dir() and is_run(path):
                runs.append(path)
        except PermissionError as problem:
            if warns:
                logger.warning("%s is not shown: it cannot be read (%s)", path, problem.strerror)
    return sorted(runs, key=written_at, reverse=True)


def written_at(path: Path) -> float:
    """Return the time of the last write to a file or folder; 0 if it has been deleted."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's, even if the run has just begun; a folder with only a user's config is not."""
    if any((folder / name).exists() for name in ("metrics.jsonl", "trajectories")):
        return True
    try:
        config = contained(folder, "config.yaml")
        if config is None:
            return False
        with config.open("rb") as lines:
            return lines.read(len(RESOLVED_HEAD.encode())) == RESOLVED_HEAD.encode()
    except (OSError, DataError):
        return False
