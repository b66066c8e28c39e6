"""Check a call's arguments against the tool's JSON schema, and say in one sentence for the model what does not fit.

    problem({"top_k": "3"}, {"properties": {"top_k": {"type": "integer"}}})  ->  "'top_k' must be an integer, not '3'"

A small part of JSON schema, chosen for messages that a model can act on: type, nullable, enum, anyOf, properties,
required, items, additionalProperties. Everything else is left to the tool.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from polyturn.core.errors import did_you_mean

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (Mapping,),
    "null": (type(None),),
}


def arguments_problem(
    arguments: Mapping[str, Any], parameters: Mapping[str, Any], *, also: Collection[str] = ()
) -> str | None:
    """Return what is wrong with a call's arguments, for the model to read; None if they fit.

    Args:
        arguments: What the model wrote.
        parameters: The schema of the function's parameters. An argument that it does not name is wrong, unless it has
            additionalProperties.
        also: Names that are fine although the schema does not have them.
    """
    known = parameters.get("properties") or {}
    if not parameters.get("additionalProperties"):
        for name in arguments:
            if name not in known and name not in also:
                return f"there is no argument {name!r}.{did_you_mean(name, known) if known else ' It takes none.'}"
    return _object_problem(arguments, parameters, path="")


def _object_problem(value: Mapping[str, Any], schema: Mapping[str, Any], *, path: str) -> str | None:
    known = schema.get("properties") or {}
    for name in schema.get("required") or ():
        if name not in value:
            return f"the argument {_join(path, name)!r} is missing"
    others = schema.get("additionalProperties")
    for name, item in value.items():
        of = known.get(name, others)
        if of is False:
            return f"there is no argument {_join(path, name)!r}"
        if isinstance(of, Mapping) and (wrong := _problem(item, of, path=_join(path, name))):
            return wrong
    return None


def _problem(value: Any, schema: Mapping[str, Any], *, path: str) -> str | None:
    if value is None and schema.get("nullable"):
        return None
    options = schema.get("anyOf")
    if isinstance(options, list) and options:
        tried = [_problem(value, o, path=path) for o in options if isinstance(o, Mapping)]
        return None if None in tried or not tried else tried[0]
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds or []
    if kinds and not any(_is(value, kind) for kind in kinds):
        article = "an" if kinds[0][:1] in "aeio" else "a"
        return f"{path!r} must be {article} {' or '.join(kinds)}, not {_show(value)}"
    allowed = schema.get("enum")
    if allowed and value not in allowed:
        return f"{path!r} must be one of {', '.join(map(_show, allowed))}, not {_show(value)}"
    items = schema.get("items")
    if isinstance(value, list) and isinstance(items, Mapping):
        for index, item in enumerate(value):
            if wrong := _problem(item, items, path=f"{path}[{index}]"):
                return wrong
    return _object_problem(value, schema, path=path) if isinstance(value, Mapping) else None


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean" or kind not in _TYPES
    return isinstance(value, _TYPES.get(kind, (object,)))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
