"""Whose code a file is: the library's own, Python's, an installed package's, or else an author's."""

from __future__ import annotations

import sysconfig
from pathlib import Path

OURS = str(Path(__file__).resolve().parents[1]) + "/"
PACKAGES = tuple({sysconfig.get_path(name) + "/" for name in ("purelib", "platlib")})
STDLIB = sysconfig.get_path("stdlib") + "/"


def is_ours(filename: str) -> bool:
    """Return whether a file of code belongs to the library."""
    return filename.startswith(OURS)


def is_stdlib(filename: str) -> bool:
    """Return whether code is Python's own, or was made by no file."""
    return filename.startswith("<") or (filename.startswith(STDLIB) and not filename.startswith(PACKAGES))
