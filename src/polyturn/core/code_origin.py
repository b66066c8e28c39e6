"""Tells the code of plug-in authors from that of polyturn, of Python and of installed packages, by file name."""

from __future__ import annotations

import functools
import inspect
import os
import sysconfig
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

OURS = str(Path(__file__).parents[1]) + "/"
"""The folder of polyturn. Links are not resolved, because a code object has the path that it was imported by."""
PACKAGES = tuple({sysconfig.get_path(name) + "/" for name in ("purelib", "platlib")})
STDLIB = sysconfig.get_path("stdlib") + "/"


def is_ours(filename: str) -> bool:
    """Return whether a source file belongs to polyturn."""
    return filename.startswith(OURS)


def is_stdlib(filename: str) -> bool:
    """Return whether a source file belongs to Python, or the code comes from no file."""
    return filename.startswith("<") or (filename.startswith(STDLIB) and not filename.startswith(PACKAGES))


def is_an_authors(filename: str) -> bool:
    """Return whether a source file belongs to a plug-in author: not to polyturn, Python or an installed package."""
    is_of_cython = filename.endswith((".pyx", ".pxi"))  # of a package such as pyarrow, which names it by a relative path
    return not (is_of_cython or is_stdlib(filename) or filename.startswith((OURS, *PACKAGES)))


def passed_an_author(problem: BaseException) -> bool:
    """Return whether an exception passed through a plug-in author's code on its way here."""
    return any(is_an_authors(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(problem.__traceback__))


def defined_at(code: Any) -> str:
    """Return the position of an author's function, class or object as " (tutor.py, line 12)"; "" for all other code.

    The position of an object is that of its class.
    """
    while isinstance(code, functools.partial):
        code = code.func
    try:
        code = inspect.unwrap(code)
        if not (inspect.isfunction(code) or inspect.ismethod(code) or isinstance(code, type)):
            code = type(code)
        file = inspect.getsourcefile(code)
        if file is None or not is_an_authors(file):
            return ""
        line = inspect.getsourcelines(code)[1] if isinstance(code, type) else code.__code__.co_firstlineno
    except Exception:  # there is no source, or a changed one; an author's `__getattr__` may raise anything
        return ""
    return line_of(file, line)


def line_of(file: str, line: int) -> str:
    """Return a line of a file as the end of a message: " (tutor.py, line 12)"."""
    return f" ({os.path.basename(file)}, line {line})"


def describe_position(frames: list[FrameType]) -> str:
    """Describe the outermost function of a plug-in author in a stack; "" if only polyturn and Python are in it.

    If no author's function is in it, a function of an installed package is described: the plug-in may be installed.
    `frames` begins with the outermost frame. "now at" is the line of the innermost frame outside the standard library.
    """
    outside = [frame for frame in frames if not is_stdlib(frame.f_code.co_filename)]
    foreign = [frame for frame in outside if not is_ours(frame.f_code.co_filename)]
    if not foreign:
        return ""
    first = next((frame for frame in foreign if is_an_authors(frame.f_code.co_filename)), foreign[0])
    at = outside[-1]
    name, defined = first.f_code.co_qualname, f"{first.f_code.co_filename}:{first.f_code.co_firstlineno}"
    return f"{name} ({defined}, now at {at.f_code.co_filename}:{at.f_lineno})"
