"""A control group per sandbox: limits memory, processes and CPU time of all its processes together.

Both versions of the kernel's interface are supported: version 2 with one tree, and version 1 with one tree per controller.
If neither is writable, which is usual without root, there is no group, and the limits apply to each process separately. A
group's name has the id of the process that created it, so that later processes can remove the groups of dead ones.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
_NAME = re.compile(r"polyturn-sandbox-(\d+)-")
_PERIOD = 100_000
"""Period of the CPU time limit, in microseconds."""


class ControlGroup:
    """The folders of one sandbox's group."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)

    @property
    def doors(self) -> tuple[str, ...]:
        """The files into which a process writes its id to enter the group."""
        return tuple(str(folder / "cgroup.procs") for folder in self._folders)

    def remove(self) -> None:
        """Kill the remaining processes and remove the group."""
        for folder in self._folders:
            for _ in range(200):
                with contextlib.suppress(OSError, ValueError):
                    for pid in (folder / "cgroup.procs").read_text().split():
                        os.kill(int(pid), signal.SIGKILL)
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.005)  # killed processes are still in the group


def make_group(
    name: str, *, memory_mb: int, processes: int, cpus: float | None = None, root: Path = ROOT
) -> ControlGroup | None:
    """Make a group with these limits; return None if control groups are not available."""
    groups: list[Path] = []
    try:
        for parents, must, may in _trees(root, memory_mb=memory_mb, processes=processes, cpus=cpus):
            groups.append(_make(parents, name, must, may))
    except OSError:
        ControlGroup(groups).remove()
        return None
    return ControlGroup(groups)


def sweep(root: Path = ROOT) -> None:
    """Remove empty groups of processes that no longer exist."""
    own = _own_paths()
    parents = {root, root / "memory", root / "pids", root / "cpu"}
    parents |= {root / kind / path for kind, path in own.items()}
    for parent in parents:
        with contextlib.suppress(OSError):
            for folder in parent.iterdir():
                match = _NAME.match(folder.name)
                if match and not Path(f"/proc/{match[1]}").exists():
                    with contextlib.suppress(OSError):
                        folder.rmdir()


class _Tree(NamedTuple):
    """One tree of control groups, and the files to write for a group in it."""

    parents: Sequence[Path]
    """Possible parent folders, this process's own group first."""
    must: dict[str, int | str]
    """File name -> value that must be written."""
    may: dict[str, int | str]
    """File name -> value that is written if the file exists."""


def _trees(root: Path, *, memory_mb: int, processes: int, cpus: float | None) -> Iterator[_Tree]:
    own, memory = _own_paths(), memory_mb << 20
    quota = None if cpus is None else max(1000, int(cpus * _PERIOD))
    if (root / "cgroup.controllers").exists():
        must: dict[str, int | str] = {"memory.max": memory, "pids.max": processes}
        must |= {} if quota is None else {"cpu.max": f"{quota} {_PERIOD}"}
        yield _Tree([root / own.get("", ""), root], must, {"memory.swap.max": 0})
        return
    folders = {kind: [root / kind / own.get(kind, ""), root / kind] for kind in ("memory", "pids", "cpu")}
    yield _Tree(folders["memory"], {"memory.limit_in_bytes": memory}, {"memory.memsw.limit_in_bytes": memory})
    yield _Tree(folders["pids"], {"pids.max": processes}, {})
    if quota is not None:
        yield _Tree(folders["cpu"], {"cpu.cfs_period_us": _PERIOD, "cpu.cfs_quota_us": quota}, {})


def _make(parents: Sequence[Path], name: str, must: dict[str, int | str], may: dict[str, int | str]) -> Path:
    problem: OSError = FileNotFoundError("no control group to start from")
    for parent in parents:
        folder = parent / name
        try:
            folder.mkdir()
        except OSError as error:
            problem = error
            continue
        try:
            for file, value in must.items():
                _write(folder / file, value)
        except OSError as error:
            problem = error
            with contextlib.suppress(OSError):
                folder.rmdir()
            continue
        for file, value in may.items():
            with contextlib.suppress(OSError):
                _write(folder / file, value)
        return folder
    raise problem


def _write(path: Path, value: int | str) -> None:
    with path.open("r+") as file:  # does not create the file
        file.write(str(value))


def _own_paths() -> dict[str, str]:
    """Return this process's path in each tree: {"memory": "a/b", "": "in the one tree"}."""
    paths = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            paths.update(dict.fromkeys(kinds.split(","), path.lstrip("/")))
    return paths
