"""The arguments that a plug-in's method accepts, read once when the plug-in is loaded instead of tried out in every call.

num_positional(tool.release)           1, or None for any number
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def num_positional(function: Callable[..., Any]) -> int | None:
    """Return how many positional arguments `function` takes; None when any number, or when nobody knows."""
    parameters = _parameters(function)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters) or not (parameters or _is_readable(function)):
        return None
    return sum(p.kind in _POSITIONAL for p in parameters)


def has_parameter(function: Callable[..., Any], name: str) -> bool:
    """Return whether `function` has a parameter called `name`."""
    return any(p.name == name and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in _parameters(function))


def is_required(function: Callable[..., Any], name: str) -> bool:
    """Return whether `function` has a parameter called `name` and no default for it."""
    return any(p.name == name and p.default is p.empty for p in _parameters(function)) and has_parameter(function, name)


def required(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters of `function` without a default, in their order."""
    return tuple(p.name for p in _parameters(function) if is_required(function, p.name))


def lacks(function: Callable[..., Any], name: str) -> bool:
    """Return whether `function` has a parameter called `name` and no value for it: no default, or None."""
    unset = [p.name for p in _parameters(function) if p.default is p.empty or p.default is None]
    return name in unset and has_parameter(function, name)


def takes_any_keyword(function: Callable[..., Any]) -> bool:
    """Return whether `function` ends in `**kwargs`."""
    return any(p.kind is p.VAR_KEYWORD for p in _parameters(function))


def _is_readable(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function)
    except (TypeError, ValueError):
        return False
    return True


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values()) if _is_readable(function) else []
