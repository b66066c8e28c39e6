"""The depth of nested lists and mappings, counted without recursion.

Data of files and networks is checked where it comes in, so that no code behind it can be led into a recursion without end.
"""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 64
"""Schemas of tools, the deepest that is written by hand, have about ten."""


def is_deep(value: Any) -> bool:
    """Return whether lists, tuples and mappings lie deeper inside each other than `MAX_DEPTH`."""
    return excess(value) is not None


def excess(value: Any, *, max_depth: int = MAX_DEPTH, max_count: int | None = None) -> str | None:
    """Return of what a value has too much, as a sentence's end: depth, or lists and mappings; None if it has not."""
    level, count = [value], 0
    for _ in range(max_depth + 1):
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                below += [v for v in one.values() if isinstance(v, dict | list | tuple)]
            elif isinstance(one, list | tuple):
                below += [v for v in one if isinstance(v, dict | list | tuple)]
        count += len(below)
        if max_count is not None and count > max_count:
            return f"it holds more than {max_count} lists and objects"
        if not below:
            return None
        level = below
    return f"it is nested deeper than {max_depth}"
