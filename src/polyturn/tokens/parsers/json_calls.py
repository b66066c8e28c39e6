"""The JSON reader of all parsers. It accepts invalid JSON if its meaning is certain; other errors are shown to the model.

Accepted beyond the standard: a comma after the last element, line breaks and tabs inside strings, arguments that are a JSON
string of an object, `parameters` instead of `arguments`. Not accepted: NaN, infinite numbers, single quotes, comments, more
than 64 levels of nesting, integers of thousands of digits. Reading takes linear time, because the end of a value is found
before the value is decoded.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from polyturn.core.messages import ToolCall
from polyturn.tokens.parsers.base import broken

MAX_DEPTH = 64
"""Maximum number of nesting levels in arguments; deeper values could exceed the recursion limit of code that reads them."""
_MARK = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[{}\[\]]', re.DOTALL)
_COMMA = re.compile(r'("(?:[^"\\]++|\\.)*+(?:"|\\?\Z))|,(?=\s*+[}\]])', re.DOTALL)


class BadJsonError(Exception):
    """Text that is not JSON; the message says why, for the model."""


def loads(text: str) -> Any:
    """Decode one JSON value.

    Raises:
        BadJsonError: `text` is not a JSON value, or is nested too deeply.
    """
    depth = 0
    for mark in _MARK.finditer(text):
        if mark[0] in "{[":
            depth += 1
            if depth > MAX_DEPTH:
                raise BadJsonError(f"nested too deeply, more than {MAX_DEPTH} levels")
        elif mark[0] in "}]":
            depth -= 1
    try:
        return _decode(text)
    except BadJsonError:
        without = _COMMA.sub(lambda m: m[1] or "", text)
        if len(without) == len(text):
            raise
        return _decode(without)


def _decode(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as problem:
        raise BadJsonError(f"{problem.msg} at character {problem.pos}") from problem
    except RecursionError as problem:
        raise BadJsonError("nested too deeply") from problem
    except ValueError as problem:  # NaN, or an integer of thousands of digits
        raise BadJsonError(str(problem).partition(";")[0]) from problem


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"{digits[:20]} is too large")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, strict=False)


def find_end(text: str, start: int) -> int | None:
    """Return the end index of the object or array that opens at `start`; None if it is not closed."""
    depth = 0
    for mark in _MARK.finditer(text, start):
        if mark[0] in "{[":
            depth += 1
        elif mark[0] in "}]":
            depth -= 1
            if depth <= 0:
                return mark.end()
    return None


def read_call(text: str, raw: str) -> ToolCall:
    """Parse a JSON object with name and arguments to a call; `raw` is the model's text for the call."""
    try:
        data = loads(text)
    except BadJsonError as problem:
        return broken(raw, f"the tool call is not valid JSON ({problem})")
    return call_from(data, raw)


def call_from(data: Any, raw: str) -> ToolCall:
    """Convert decoded JSON to a call."""
    if not isinstance(data, dict):
        return broken(raw, f"a tool call must be a JSON object, not {json_type(data)}")
    name = data.get("name")
    if not isinstance(name, str) or not name:
        what = f"not {json_type(name)}" if "name" in data and name != "" else "and this call has none"
        return broken(raw, f'a tool call needs a "name" that is a string, {what}')
    key = "arguments" if "arguments" in data or "parameters" not in data else "parameters"
    return with_arguments(name, data.get(key, {}), raw, key=key)


def with_arguments(name: str, arguments: Any, raw: str, *, key: str = "arguments", id: str = "") -> ToolCall:
    """Return a call of `name`. `arguments` are decoded, or are a string of JSON, which is decoded here."""
    if isinstance(arguments, str):
        try:
            arguments = loads(arguments) if arguments.strip() else {}
        except BadJsonError as problem:
            return broken(raw, f'"{key}" is not valid JSON ({problem})', name=name)
    if not isinstance(arguments, dict):
        return broken(raw, f'"{key}" must be a JSON object, not {json_type(arguments)}', name=name)
    return ToolCall(id=id, name=name, arguments=arguments, raw=raw)


def json_type(value: Any) -> str:
    """Return JSON's name for the type of a value, with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    return "a string" if isinstance(value, str) else "an array" if isinstance(value, list) else "an object"
