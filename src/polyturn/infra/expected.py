"""Pydantic's errors in plain words: what a value must be.

{"type": "int_parsing", "input": "many", …}                     ->  "it must be a whole number"
{"type": "greater_than_equal", "input": 0, "ctx": {"ge": 1}}    ->  "it must be at least 1"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polyturn.core.secrets import is_secret_name, masked

if TYPE_CHECKING:
    from pydantic import ValidationError

_KINDS = {
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    **dict.fromkeys(("dict_type", "mapping_type"), "a mapping of names to values"),
    "finite_number": "a finite number",
    "string_type": "a text",
    "path_type": "a path",
}
_LIMITS = {
    "greater_than_equal": ("ge", "at least {}"),
    "greater_than": ("gt", "more than {}"),
    "less_than_equal": ("le", "at most {}"),
    "less_than": ("lt", "less than {}"),
    "too_short": ("min_length", "{} or more items long"),
    "too_long": ("max_length", "{} or fewer items long"),
    "string_too_short": ("min_length", "a text of {} or more characters"),
    "string_too_long": ("max_length", "a text of {} or fewer characters"),
    "string_pattern_mismatch": ("pattern", "a text that matches {}"),
}
"""Type of an error -> the limit's key in `ctx`, and words for it."""


def expected(problem: Mapping[str, Any]) -> str:
    """Say what a value must be, for an item of `ValidationError.errors()`; a validator's message is not changed."""
    kind = problem["type"]
    if kind in _KINDS:
        return f"it must be {_KINDS[kind]}"
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        limit = problem["ctx"][name]
        return "it must be " + words.format(f"{limit:g}" if isinstance(limit, float) else limit)
    message: str = problem["msg"]
    if message.startswith("Input should be "):
        return message.replace("Input should be", "it must be", 1)
    return message.removeprefix("Value error, ").removeprefix("Assertion failed, ")


def sentences(problem: ValidationError, *, shows_values: bool = True) -> list[str]:
    """Return a sentence for each invalid value: "max_turns is '3'; it must be a whole number".

    Values under a secret's name are hidden.
    """
    sentences = []
    for one in problem.errors(include_url=False):
        path = [str(part) for part in one["loc"]]
        name, message = ".".join(path), expected(one)
        if one["type"] == "missing":
            sentences.append(f"{name} is missing")
        else:
            is_shown = shows_values and not any(map(is_secret_name, path))
            sentence = f"{name} is {masked(one['input'])!r:.100}; {message}" if is_shown else f"{name}: {message}"
            sentences.append(sentence if name else message)
    return sentences
