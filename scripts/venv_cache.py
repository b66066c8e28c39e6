"""Virtual environments under the user's cache, each built once: complete, or not there.

    interpreter = built(folder, fill)     folder/bin/python; `fill(python)` installs into it where it is not there yet

An environment is built in a folder of its own, stamped, and moved into place with one rename, so that nobody takes half of
one for the whole. Who builds the same one meanwhile waits for the first, and a build that was interrupted is made again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

STAMP = ".complete"


def interpreter(folder: Path) -> Path | None:
    """Return the interpreter of the environment in `folder`; None where it was never built to the end."""
    return folder / "bin" / "python" if (folder / STAMP).exists() else None


def built(folder: Path, fill: Callable[[Path], object]) -> Path:
    """Build the environment in `folder` unless it is there; return its interpreter.

    Args:
        folder: Where it will lie; its name says what is in it.
        fill: Installs packages with the interpreter that it is given.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released however its holder ends
        if found := interpreter(folder):
            return found
        building = folder.with_name(f"{folder.name}.building")
        for interrupted in (building, folder):
            shutil.rmtree(interrupted, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(building)], check=True)
        fill(building / "bin" / "python")
        _write_other_folder(building, folder)
        (building / STAMP).touch()
        building.rename(folder)
    return folder / "bin" / "python"


def _write_other_folder(here: Path, there: Path) -> None:
    """Let the programs in `here` start the interpreter that will lie in `there`."""
    for program in (*(here / "bin").iterdir(), here / "pyvenv.cfg"):
        if program.is_symlink() or not program.is_file():
            continue
        content = program.read_bytes()
        if os.fsencode(here) in content:
            program.write_bytes(content.replace(os.fsencode(here), os.fsencode(there)))
