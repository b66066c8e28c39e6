"""The processes of a Ray cluster on this machine, found by a mark that is in the environment of each of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

MARK = "POLYTURN_TEST_CLUSTER"
"""The variable that has the mark; set it before the cluster is made."""


def processes_of(mark: str, word: str) -> list[int]:
    """Return the processes of a cluster that have `word` in their command line: an actor's has the name of its class."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            is_one = process.name.isdigit() and word.encode() in (process / "cmdline").read_bytes()
            if is_one and mark.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue  # it ended meanwhile
    return found


def wait_until(is_so: Callable[[], object], *, seconds: float = 120.0) -> None:
    """Return once `is_so()` is true, or after `seconds`; the caller checks it again."""
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)
