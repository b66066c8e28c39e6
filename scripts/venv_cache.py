"""Virtual environments under the user's cache, each built once: complete, or not there.

    interpreter = built(folder, fill)     folder/bin/python; `fill(python)` installs into it where it is not there yet

An environment is built in a folder of its own, stamped, and moved into place with one rename, so that half of one is never
taken for the whole. A second build of the same one waits for the first, and a build that was interrupted is made again.
Environments are named NAME-HASH. A build removes those of the same name that were not used for two weeks.
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
"""Its time of modification is the last use."""
UNUSED_S = 14 * 24 * 3600


def interpreter(folder: Path) -> Path | None:
    """Return the interpreter of the environment in `folder`; None where it was never built to the end."""
    return folder / "bin" / "python" if (folder / STAMP).exists() else None


def built(folder: Path, fill: Callable[[Path], object], *, python: str = sys.executable) -> Path:
    """Build the environment in `folder` unless it is there; return its interpreter.

    Args:
        folder: Where it will lie; its name says what is in it.
        fill: Installs packages with the interpreter that it is given.
        python: The interpreter that the environment is made with.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released however its holder ends
        if found := interpreter(folder):
            (folder / STAMP).touch()
            return found
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
    """Remove environments of the same name and another hash that were not used for `UNUSED_S`."""
    name = folder.name.rpartition("-")[0]
    for stamp in folder.parent.glob(f"{name}-*/{STAMP}"):
        if stamp.parent != folder and stamp.stat().st_mtime < time.time() - UNUSED_S:
            shutil.rmtree(stamp.parent, ignore_errors=True)


def _write_other_folder(here: Path, there: Path) -> None:
    """Let the programs in `here` start the interpreter that will lie in `there`."""
    for program in (*(here / "bin").iterdir(), here / "pyvenv.cfg"):
        if program.is_symlink() or not program.is_file():
            continue
        content = program.read_bytes()
        if os.fsencode(here) in content:
            program.write_bytes(content.replace(os.fsencode(here), os.fsencode(there)))
