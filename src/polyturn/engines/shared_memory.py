"""SessionMemory: the shared memory that a server's processes hold, so that it can be removed once they were killed.

A file in /dev/shm outlives the processes that map it; vLLM leaves hundreds of megabytes there when it is killed. Whose a
file is shows only while its processes live, so it is looked up while they do. It is known by its inode: a semaphore is
mapped under the temporary name that it had before its own.

Of others nothing is removed: a file goes that appeared after the server was started, was held by a process of the server's
session, and is held by no living process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_FOLDER = Path("/dev/shm")


class SessionMemory:
    """What processes hold of the files in shared memory that appeared since this was made."""

    def __init__(self) -> None:
        """Begin now: what is there already is another's."""
        self._others = set(shared_files())
        self._own: set[int] = set()

    def look(self, pids: Iterable[int]) -> None:
        """Note which of the files the processes `pids` hold."""
        new = set(shared_files()) - self._others - self._own
        if new:
            self._own |= new & held(pids)

    def remove_unheld(self) -> list[str]:
        """Remove the files that were noted and that no living process holds; return their names."""
        left = {inode: path for inode, path in shared_files().items() if inode in self._own}
        if not left:
            return []
        in_use = held(int(name) for name in os.listdir("/proc") if name.isdigit())
        removed = []
        for inode, path in left.items():
            if inode not in in_use:
                path.unlink(missing_ok=True)
                removed.append(path.name)
        return sorted(removed)


def shared_files() -> dict[int, Path]:
    """Return the files in shared memory by their inodes; none where the system has no such folder."""
    found = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(_FOLDER) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                found[entry.inode()] = Path(entry.path)
    return found


def held(pids: Iterable[int]) -> set[int]:
    """Return the inodes of the files in shared memory that processes map or have open; a process that has ended has none."""
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            inodes.update(_mapped(pid))
        with contextlib.suppress(OSError):
            inodes.update(_open(pid))
    return inodes


def _mapped(pid: int) -> Iterator[int]:
    with Path(f"/proc/{pid}/maps").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            fields = line.split(maxsplit=5)  # addresses, permissions, offset, device, inode, path
            if len(fields) == 6 and fields[5].startswith(f"{_FOLDER}/"):
                yield int(fields[4])


def _open(pid: int) -> Iterator[int]:
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(entry.path).startswith(f"{_FOLDER}/"):
                yield os.stat(entry.path).st_ino
