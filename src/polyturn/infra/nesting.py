"""Checks the depth of nested lists and mappings without recursion.

Data from files and the network is checked on arrival, so that recursive code can handle it without overflowing the stack.
"""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 64
"""The most levels of nesting. Tool schemas, the deepest data that people write by hand, have about ten."""


def is_deep(value: Any) -> bool:
    """Return whether lists, tuples and mappings are nested deeper than `MAX_DEPTH`."""
    return excess(value) is not None


def excess(value: Any, *, max_depth: int = MAX_DEPTH, max_count: int | None = None) -> str | None:
    """Return which limit a value exceeds, as the end of a message: depth, or lists and mappings; None if none."""
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
