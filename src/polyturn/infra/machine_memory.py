"""Reads the size of the memory that this process may use: the machine's memory, or its container's limit if that is less."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def machine_memory(root: Path = ROOT) -> int:
    """Return the bytes of memory of this machine, or of its container if that is limited to less.

    Args:
        root: The folder where the kernel shows control groups.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in (root / "memory.max", root / "memory" / "memory.limit_in_bytes"):
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # there is no such group, or its limit is "max"
            continue
    return min(limits)
