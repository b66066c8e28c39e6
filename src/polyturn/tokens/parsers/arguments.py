"""Types for arguments that a format writes as bare text, taken from the tool's JSON schema.

    <parameter=count>5</parameter>     "5" for a string parameter, 5 for an integer one

A text that does not fit its type stays a string, so that the tool's own check says what is wrong. Where there is no
schema, text that reads as JSON is that value and other text is a string.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from polyturn.tokens.parsers.base import Tools
from polyturn.tokens.parsers.json_calls import BadJsonError, loads

_INTEGER = re.compile(r"[-+]?[0-9]{1,400}")
_WORDS = {"true": True, "false": False}
_NULLS = {"null", "none"}


def properties_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """Return the schemas of a tool's parameters by name; empty for a tool that is not known."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            found = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return found if isinstance(found, Mapping) else {}
    return {}


def convert(text: str, schema: Any) -> Any:
    """Return the value that `text` stands for under a parameter's JSON schema (None: there is no schema)."""
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
    """Return the types that a schema allows, in its order; none when it does not say."""
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
    """Return whether `text` is a value of type `kind`, and the value."""
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
