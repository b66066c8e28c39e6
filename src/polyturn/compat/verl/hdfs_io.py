"""verl.utils.hdfs_io: `exists`, `makedirs` and `copy` for files of this machine; HDFS is refused by name."""

from __future__ import annotations

import os
import shutil
from typing import Any

from polyturn.core.errors import ConfigError


def exists(path: str, **kwargs: Any) -> bool:
    """Return whether there is such a file or folder."""
    return os.path.exists(_local(path))


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = False, **kwargs: Any) -> None:
    """Make a folder and those above it."""
    os.makedirs(_local(name), mode=mode, exist_ok=exist_ok)


def copy(src: str, dst: str, **kwargs: Any) -> str:
    """Copy a file, or a folder with all that is in it, and return where it is now."""
    source, target = _local(src), _local(dst)
    return str(shutil.copytree(source, target, **kwargs) if os.path.isdir(source) else shutil.copy(source, target, **kwargs))


def _local(path: str) -> str:
    if path.startswith("hdfs://"):
        raise ConfigError(f"{path!r} is in HDFS, which is not reached from here; copy it to a folder and name that")
    return path
