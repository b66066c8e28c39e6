"""Checks that a folder or file can be written, before anything is computed for it.

    check_writable(Path("/proc/out"))    ConfigError: the folder '/proc/out' cannot be made or written (FileNotFoundError: …)

The check creates and removes a folder in it or in its parent, because permission bits are wrong for /proc and read-only
disks.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from polyturn.core.errors import ConfigError, one_line


def check_writable(folder: Path, *, instead: str = "name another") -> None:
    """Refuse a folder that cannot be created or written; it need not exist yet.

    Args:
        folder: The folder.
        instead: What to do instead, for the message.

    Raises:
        ConfigError: the folder cannot be created or written.
    """
    try:
        above = next(one for one in (folder.absolute(), *folder.absolute().parents) if _is_there(one))
        os.rmdir(tempfile.mkdtemp(prefix=".polyturn-", dir=above))
    except (OSError, ValueError) as problem:
        raise cannot_be_made(folder, problem, instead=instead) from problem


def check_file_writable(file: Path, *, instead: str = "name another") -> None:
    """Refuse a file that cannot be written; neither the file nor its folder need exist yet.

    Raises:
        ConfigError: the path is not a regular file (but a folder, device or pipe), its name is invalid, or its folder
            cannot be created or written.
    """
    try:
        kind = "a folder" if file.is_dir() else "a device or pipe" if file.exists() and not file.is_file() else ""
        if file.is_file():
            file.open("ab").close()
    except OSError as problem:
        raise ConfigError(f"the file {str(file)!r:.200} cannot be written ({problem.strerror}); {instead}") from problem
    if kind:
        raise ConfigError(f"{str(file)!r} is {kind}, not a regular file; {instead}")
    check_writable(file.parent, instead=instead)


def cannot_be_made(folder: Path, problem: Exception, *, instead: str) -> ConfigError:
    """Return the error for a folder that cannot be created or written because of `problem`."""
    return ConfigError(f"the folder {str(folder)!r} cannot be made or written ({one_line(problem)}); {instead}")


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True  # the caller reports any other failure, for example of a name that is too long
