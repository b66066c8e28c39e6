"""Whose code a file is: the library's own, Python's, an installed package's, or else an author's."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from types import FrameType

OURS = str(Path(__file__).parents[1]) + "/"
"""Not resolved: code is named by the path that it was imported by, through whatever links."""
PACKAGES = tuple({sysconfig.get_path(name) + "/" for name in ("purelib", "platlib")})
STDLIB = sysconfig.get_path("stdlib") + "/"


def is_ours(filename: str) -> bool:
    """Return whether a file of code belongs to the library."""
    return filename.startswith(OURS)


def is_stdlib(filename: str) -> bool:
    """Return whether code is Python's own, or was made by no file."""
    return filename.startswith("<") or (filename.startswith(STDLIB) and not filename.startswith(PACKAGES))


def is_an_authors(filename: str) -> bool:
    """Return whether code is neither the library's, nor Python's, nor an installed package's."""
    return not is_stdlib(filename) and not filename.startswith((OURS, *PACKAGES))


def place_of(frames: list[FrameType]) -> str:
    """Return which code of an author a stack of frames, the outermost first, is in; "" where it is in none."""
    frames_of_user = [frame for frame in frames if not is_stdlib(frame.f_code.co_filename)]
    first = next((frame for frame in frames_of_user if not is_ours(frame.f_code.co_filename)), None)
    if first is None:
        return ""
    at = frames_of_user[-1]
    name, defined = first.f_code.co_qualname, f"{first.f_code.co_filename}:{first.f_code.co_firstlineno}"
    return f"{name} ({defined}, now at {at.f_code.co_filename}:{at.f_lineno})"
