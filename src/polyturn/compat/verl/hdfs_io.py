"""verl.utils.hdfs_io and verl.utils.fs: files and folders of this machine; HDFS is refused."""

from __future__ import annotations

import os
import shutil
from typing import Any

from polyturn.core.errors import ConfigError


def exists(path: str, **kwargs: Any) -> bool:
    """Return whether a file or folder exists."""
    return os.path.exists(_local(path))


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = False, **kwargs: Any) -> None:
    """Create a folder and its parents."""
    os.makedirs(_local(name), mode=mode, exist_ok=exist_ok)


def copy(src: str, dst: str, **kwargs: Any) -> str:
    """Copy a file, or a folder with its content, and return the new path."""
    source, target = _local(src), _local(dst)
    return str(shutil.copytree(source, target, **kwargs) if os.path.isdir(source) else shutil.copy(source, target, **kwargs))


def _local(path: str) -> str:
    if path.startswith("hdfs://"):
        raise ConfigError(f"{path!r} is in HDFS, which is not supported; copy it to a folder and use that")
    return path


def is_non_local(path: str) -> bool:
    """Return whether a path is in HDFS."""
    return path.startswith("hdfs://")


def copy_to_local(src: str, *args: object, **kwargs: object) -> str:
    """Return the path of a file, folder or model unchanged, because nothing is downloaded."""
    return _local(src)


copy_local_path_from_hdfs = copy_to_local


def local_mkdir_safe(path: str) -> str:
    """Create a folder, possibly concurrently with another process, and return its path."""
    os.makedirs(_local(path), exist_ok=True)
    return os.path.abspath(path)
