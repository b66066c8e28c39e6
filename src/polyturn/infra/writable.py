"""Whether a folder can be written, tested before anything is computed for it.

    check_writable(Path("/proc/out"))    ConfigError: the folder '/proc/out' cannot be made or written (FileNotFoundError: …)

The test makes and removes a folder there, or above it: permission bits do not describe /proc or a read-only disk.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from polyturn.core.errors import ConfigError, one_line


def check_writable(folder: Path, *, instead: str = "name another") -> None:
    """Refuse a folder in which nothing could be written; it need not exist.

    Args:
        folder: The folder, or one that is to be made.
        instead: What to do, for the message.

    Raises:
        ConfigError: it cannot be made, or nothing can be made in it.
    """
    try:
        above = next(one for one in (folder.absolute(), *folder.absolute().parents) if _is_there(one))
        os.rmdir(tempfile.mkdtemp(prefix=".polyturn-", dir=above))
    except (OSError, ValueError) as problem:
        raise cannot_be_made(folder, problem, instead=instead) from problem


def check_file_writable(file: Path, *, instead: str = "name another") -> None:
    """Refuse a file that could not be written; it need not exist, nor its folder.

    Raises:
        ConfigError: it is there and no regular file (a folder, a device, a pipe), has a name that no file can have, or its
            folder cannot be made or written.
    """
    try:
        kind = "a folder" if file.is_dir() else "no regular file" if file.exists() and not file.is_file() else ""
        if file.is_file():
            file.open("ab").close()
    except OSError as problem:
        raise ConfigError(f"the file {str(file)!r:.200} cannot be written ({problem.strerror}); {instead}") from problem
    if kind:
        raise ConfigError(f"{str(file)!r} is {kind}, where a file is written; {instead}")
    check_writable(file.parent, instead=instead)


def cannot_be_made(folder: Path, problem: Exception, *, instead: str) -> ConfigError:
    """Return the error for a folder that cannot be made or written, because of `problem`."""
    return ConfigError(f"the folder {str(folder)!r} cannot be made or written ({one_line(problem)}); {instead}")


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True  # any other failure, of a name that is too long for instance, is the caller's to tell
