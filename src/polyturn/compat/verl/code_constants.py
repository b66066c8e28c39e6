"""Finds the names that a verl plug-in looks up in its keyword arguments, which its signature does not show.

names_in(tool.execute)    {"agent_data", "timeout"}    kwargs["agent_data"], parameters.get("timeout")
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any


def names_in(function: Callable[..., Any]) -> frozenset[str]:
    """Return the identifiers among the text constants in the code of `function`; empty if it has no Python code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return frozenset() if code is None else frozenset(name for name in _texts(code) if name.isidentifier())


def _texts(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _texts(constant)
        else:
            yield from (text for text in (constant if isinstance(constant, tuple) else (constant,)) if isinstance(text, str))
