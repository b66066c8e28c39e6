"""Builds virtual environments in the user's cache, each once; an environment is either complete or missing.

    interpreter = built(folder, fill)     folder/bin/python; `fill(python)` installs packages if it is not built yet

An environment is built in a temporary folder, stamped, and moved to its folder with one rename, so that a partial build is
never used. A second build of the same environment waits for the first, and an interrupted build is repeated. The folder of
an environment is NAME-HASH or NAME/HASH. A build removes those of the same name that were not used for two weeks.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

STAMP = ".complete"
"""File in a complete environment; its modification time is the last use."""
UNUSED_S = 14 * 24 * 3600


def interpreter(folder: Path) -> Path | None:
    """Return the interpreter of the environment in `folder`; None if the environment is not complete."""
    return folder / "bin" / "python" if (folder / STAMP).exists() else None


def built(folder: Path, fill: Callable[[Path], object], *, python: str = sys.executable) -> Path:
    """Build the environment in `folder` unless it exists; return its interpreter.

    Args:
        folder: The folder of the environment; its name must change with the content.
        fill: Installs packages with the environment's interpreter.
        python: The interpreter to create the environment with.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released even if the process is killed
        if existing := interpreter(folder):
            (folder / STAMP).touch()
            return existing
        building = folder.with_name(f"{folder.name}.building")
        for interrupted in (building, folder):
            shutil.rmtree(interrupted, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(building)], check=True)
        fill(building / "bin" / "python")
        _write_other_folder(building, folder)
        (building / STAMP).touch()
        building.rename(folder)
        _remove_unused(folder)
    return folder / "bin" / "python"


def _remove_unused(folder: Path) -> None:
    """Remove environments with the same name and another hash that were not used for `UNUSED_S` seconds."""
    name, dash, _ = folder.name.rpartition("-")
    for stamp in folder.parent.glob(f"{name}{dash}*/{STAMP}"):
        if stamp.parent != folder and stamp.stat().st_mtime < time.time() - UNUSED_S:
            shutil.rmtree(stamp.parent, ignore_errors=True)


def _write_other_folder(here: Path, there: Path) -> None:
    """Change the interpreter path in the programs of `here` to the future folder `there`."""
    for program in (*(here / "bin").iterdir(), here / "pyvenv.cfg"):
        if program.is_symlink() or not program.is_file():
            continue
        content = program.read_bytes()
        if os.fsencode(here) in content:
            program.write_bytes(content.replace(os.fsencode(here), os.fsencode(there)))
