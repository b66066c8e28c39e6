"""Check a call's arguments against the tool's JSON schema, and describe an error in one sentence for the model.

    ArgumentSchema({"properties": {"top_k": {"type": "integer"}}}).problem({"top_k": "3"})
        ->  "'top_k' must be an integer, not '3'"

`jsonschema` validates; the most common messages are reworded here. A remote `$ref` is never fetched. If a schema is broken,
its calls go to the tool unchecked, with a warning.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jsonschema
from jsonschema.exceptions import ValidationError
from referencing import Registry

from polyturn.core.errors import did_you_mean, one_line

logger = logging.getLogger(__name__)

_OPEN = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "patternProperties")
"""Keywords of a schema that may name arguments outside of `properties`."""
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")


class ArgumentSchema:
    """The parameters of one tool."""

    def __init__(self, parameters: Mapping[str, Any], *, tool: str = "", also: Collection[str] = ()) -> None:
        """Prepare a schema.

        Args:
            parameters: The schema of the function's parameters. Arguments that it does not name are errors, unless it has
                additionalProperties.
            tool: The tool's name, for warnings.
            also: Names of arguments that are allowed although the schema does not have them.
        """
        self._tool = tool
        self._also = frozenset(also)
        self._known = parameters.get("properties") or {}
        self._is_closed = not parameters.get("additionalProperties") and not any(key in parameters for key in _OPEN)
        self._is_warned = False
        base = jsonschema.validators.validator_for(parameters, default=jsonschema.Draft202012Validator)
        types = base.TYPE_CHECKER.redefine(
            "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
        )
        ordered = {key: parameters[key] for key in sorted(parameters, key=lambda key: key != "required")}
        validator = jsonschema.validators.extend(base, type_checker=types)
        self._validator = validator(_in_standard_words(ordered), registry=Registry())

    def problem(self, arguments: Mapping[str, Any]) -> str | None:
        """Return an error message about a call's arguments for the model; None if they fit."""
        known_arguments = {name: value for name, value in arguments.items() if name not in self._also or name in self._known}
        for name in known_arguments if self._is_closed else ():
            if name not in self._known:
                return (
                    f"there is no argument {name!r}.{did_you_mean(name, self._known) if self._known else ' It takes none.'}"
                )
        try:
            wrong = next(self._validator.iter_errors(known_arguments), None)
        except Exception as problem:  # any exception here is caused by the schema, not by the call
            if not self._is_warned:
                self._is_warned = True
                why = one_line(problem) or type(problem).__name__
                logger.warning("the schema of tool %r is broken; the tool gets calls unchecked: %.200s", self._tool, why)
            return None
        return None if wrong is None else _sentence(wrong)


def _in_standard_words(schema: Any) -> Any:
    """Convert `nullable: true` to an `anyOf` with null, and drop type names that JSON schema does not define."""
    if isinstance(schema, list):
        return [_in_standard_words(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    plain = {key: _in_standard_words(value) for key, value in schema.items()}
    if isinstance(plain.get("type"), str) and plain["type"] not in _TYPES:
        del plain["type"]
    return {"anyOf": [plain, {"type": "null"}]} if plain.pop("nullable", None) is True else plain


def _sentence(error: ValidationError) -> str:
    """Describe an error in one sentence; if all alternatives fail, describe the error that lies deepest in the arguments."""
    while error.context:
        error = max(error.context, key=lambda e: len(e.absolute_path))
    path = dotted(error.absolute_path)
    named, value_text = repr(path) if path else "the object of arguments", show(error.instance)
    match error.validator:
        case "required":
            name = next(name for name in error.validator_value if name not in error.instance)
            return f"the argument {f'{path}.{name}' if path else name!r} is missing"
        case "type":
            kinds = error.validator_value
            kinds = [kinds] if isinstance(kinds, str) else kinds
            article = "an" if kinds[0][:1] in "aeio" else "a"
            return f"{named} must be {article} {' or '.join(kinds)}, not {value_text}"
        case "enum":
            return f"{named} must be one of {', '.join(map(show, error.validator_value))}, not {value_text}"
        case "additionalProperties" if "patternProperties" not in error.schema:
            name = next(name for name in error.instance if name not in error.schema.get("properties", ()))
            return f"there is no argument {f'{path}.{name}' if path else name!r}"
        case "oneOf":  # no alternative failed, so more than one fits
            return f"{named} fits more than one of the forms that exclude each other: {value_text}"
    return f"{named}: {error.message if len(error.message) <= 200 else '...' + error.message[-197:]}"


def dotted(path: Iterable[str | int]) -> str:
    """Format the path of a value in a call's arguments, such as points[0].x."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def show(value: Any) -> str:
    """Format a value as JSON, cut after 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
