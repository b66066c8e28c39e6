"""The lock of a run's folder: the process that trains into it, and how the last process ended.

    .lock    process 4711 on node3       the holder of the file's lock (flock) trains
             ended: RewardError: …       written before the lock is released; a killed process writes nothing

The training loop and the commands that show runs both read these lines.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from polyturn.core.errors import ConfigError, DataError, one_line
from polyturn.infra.contained import contained, read_contained

logger = logging.getLogger(__name__)

NAME = ".lock"
ASKED = 5
"""Attempts before the lock counts as held, because `read_lock` also holds the lock for a moment."""
_OPEN = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_ENDED = "ended"
_MAX_BYTES = 4096


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Lock a run's folder against other processes inside the block; the kernel releases the lock if this process dies.

    On a file system without locks, only a warning is logged.

    Raises:
        ConfigError: another process trains into the folder, or the lock is a symbolic link.
    """
    with contextlib.ExitStack() as opened:
        file = None
        try:
            file = opened.enter_context(os.fdopen(os.open(folder / NAME, _OPEN, 0o644), "a+"))
            _lock(file)
            _write(file, f"process {os.getpid()} on {socket.gethostname()}")
        except BlockingIOError as problem:
            who = (read_contained(folder, NAME, max_bytes=_MAX_BYTES) or "another process").partition("\n")[0]
            raise ConfigError(
                f"{who} trains into {folder}; wait until it ends, or start a run with another name (name=NAME)"
            ) from problem
        except OSError as problem:
            if problem.errno == errno.ELOOP:
                raise ConfigError(
                    f"{folder / NAME} is a symbolic link, so writing to it would change another file; remove it"
                ) from problem
            file = None
            logger.warning(
                "%s cannot be locked (%s), so nothing keeps a second process from training into it", folder, problem
            )
        end = _ENDED
        try:
            yield
        except BaseException as problem:
            end = f"{_ENDED}: {one_line(problem)}"
            raise
        finally:
            if file is not None:
                with contextlib.suppress(OSError):  # such as a full disk, which earlier writes have reported
                    _write(file, f"process {os.getpid()} on {socket.gethostname()}\n{end}")


class FolderLock(NamedTuple):
    """The process that trains, or trained, into a run's folder."""

    is_held: bool
    is_ours: bool = False
    """Whether it is a process of this machine, so that a free lock proves that it has ended."""
    end: str | None = None
    """How it ended: "" for a normal end, else the error; None if it wrote nothing."""


def read_lock(folder: Path) -> FolderLock | None:
    """Read the state of a folder's lock; None if there is no lock, or it cannot be read."""
    try:
        path = contained(folder, NAME)
        if path is None:
            return None
        with path.open("rb") as file:
            lines = file.read(_MAX_BYTES).decode("utf-8", "replace").splitlines()
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released when the file is closed
    except BlockingIOError:
        return FolderLock(is_held=True)
    except (OSError, DataError):
        return None
    _, _, host = (lines[0] if lines else "").partition(" on ")
    ended, _, why = (lines[1] if len(lines) > 1 else "").partition(": ")
    return FolderLock(False, host == socket.gethostname(), why if ended == _ENDED else None)


def _lock(file: IO[str]) -> None:
    for left in range(ASKED - 1, -1, -1):
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not left:
                raise
            time.sleep(0.05)


def _write(file: IO[str], text: str) -> None:
    file.truncate(0)
    file.write(text)
    file.flush()
