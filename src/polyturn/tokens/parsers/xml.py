"""Parses formats with tags around each argument: consecutive named values up to a closing tag.

<parameter=city>          a tag with the name
Köln                      the text of the value
</parameter>              a closing tag; it ends the value only if another parameter or the end of the text follows

The type of a value comes from the tool's JSON schema: "5" for a string parameter, 5 for an integer parameter. A text that
does not fit the type stays a string, so that the tool's own validation reports it. Without a schema, text that is valid JSON
becomes that value, and other text a string.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from polyturn.core.messages import ToolCall
from polyturn.tokens.parsers.base import Tools, broken
from polyturn.tokens.parsers.json_calls import BadJsonError, loads

_INTEGER = re.compile(r"[-+]?[0-9]{1,400}")
_WORDS = {"true": True, "false": False}
_NULLS = {"null", "none"}
_NAME = re.compile(r"[^\s<>{}\[\]\"']+")


class BadArgumentsError(Exception):
    """Tagged arguments that cannot be read; the message says why, for the model."""


def read_values(text: str, head: re.Pattern[str], end: re.Pattern[str], form: str) -> dict[str, str]:
    """Return name -> text for a sequence of named values.

    Args:
        text: The values, and nothing else.
        head: Matches the opening of a value; its first group is the name.
        end: Matches the closing of a value that is followed by another value or the end.
        form: The form of a value, for the error.

    Raises:
        BadArgumentsError: there is other text, or a value is not closed.
    """
    values: dict[str, str] = {}
    position = _skip_space(text, 0)
    while position < len(text):
        opened = head.match(text, position)
        if opened is None:
            raise BadArgumentsError(f"expected {form}, found {text[position : position + 40]!r}")
        name = opened[1].strip()
        closed = end.search(text, opened.end())
        if closed is None:
            raise BadArgumentsError(f"the value of {name!r} is not closed; write {form}")
        if name in values:
            raise BadArgumentsError(f"the parameter {name!r} occurs twice")
        values[name] = text[opened.end() : closed.start()]
        position = _skip_space(text, closed.end())
    return values


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def typed_call(name: str, values: Mapping[str, str], raw: str, tools: Tools) -> ToolCall:
    """Return a call with its arguments converted to the types in the tool's schema."""
    properties = properties_of(tools, name)
    arguments: dict[str, Any] = {k: convert(v, properties.get(k)) for k, v in values.items()}
    return ToolCall(id="", name=name, arguments=arguments, raw=raw)


def check_name(name: str, raw: str, form: str) -> ToolCall | None:
    """Return a broken call if `name` cannot be the name of a tool, else None."""
    if _NAME.fullmatch(name):
        return None
    what = f"and {name[:40]!r} is not one" if name else "and this call has none"
    return broken(raw, f"a tool call needs a name, {what}; write {form}")


def properties_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """Return parameter name -> schema for a tool; empty for an unknown tool."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return properties if isinstance(properties, Mapping) else {}
    return {}


def convert(text: str, schema: Any) -> Any:
    """Convert `text` to a value by a parameter's JSON schema; `schema` is None if there is none."""
    types = _types(schema)
    if "null" in types and text.strip().lower() in _NULLS:
        return None
    if not types:
        return _guess(text)
    for kind in types:
        fits, value = _read_as(text, kind)
        if fits:
            return value
    return text


def _types(schema: Any) -> list[str]:
    """Return the types that a schema allows, in order; empty if it does not limit them."""
    if not isinstance(schema, Mapping):
        return []
    written = schema.get("type")
    if isinstance(written, str):
        return [written]
    if isinstance(written, list):
        return [t for t in written if isinstance(t, str)]
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list):
            return [t for option in options for t in _types(option)]
    values = schema.get("enum")
    return ["string"] if isinstance(values, list) and values and all(isinstance(v, str) for v in values) else []


def _read_as(text: str, kind: str) -> tuple[bool, Any]:
    """Return (whether `text` is a value of type `kind`, the value)."""
    bare = text.strip()
    if kind == "string":
        return True, text
    if kind == "boolean":
        return bare.lower() in _WORDS, _WORDS.get(bare.lower())
    if kind == "integer" and _INTEGER.fullmatch(bare):
        return True, int(bare)
    if kind not in ("integer", "number", "array", "object"):
        return False, None
    try:
        value = loads(bare)
    except BadJsonError:
        return False, None
    if kind == "integer":
        is_whole = isinstance(value, float) and value.is_integer()
        return is_whole, int(value) if is_whole else None
    wanted = {"number": (int, float), "array": (list,), "object": (dict,)}[kind]
    return isinstance(value, wanted) and not isinstance(value, bool), value


def _guess(text: str) -> Any:
    try:
        value = loads(text)
    except BadJsonError:
        return text
    return text if isinstance(value, str) else value
