"""Check a call's arguments against the tool's JSON schema, and say in one sentence for the model what does not fit.

    ArgumentSchema({"properties": {"top_k": {"type": "integer"}}}).problem({"top_k": "3"})
        ->  "'top_k' must be an integer, not '3'"

`jsonschema` reads the schema; the sentences are ours. A schema may be foreign: nothing is fetched for a `$ref`,
patterns run in an engine that needs linear time, and a check ends after `MAX_CPU_S`. A call that a schema cannot judge is
left to the tool, with a warning.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import jsonschema
from jsonschema.exceptions import UnknownType, ValidationError
from pydantic_core import SchemaValidator, core_schema
from referencing import Registry

from polyturn.core.errors import did_you_mean, one_line

logger = logging.getLogger(__name__)

MAX_CPU_S = 0.25
"""Time of the processor for the check of one call."""
_OPEN = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "patternProperties")
"""Keywords beside which arguments may be named elsewhere than in `properties`."""


class _OutOfTimeError(Exception):
    """The check takes too long."""


class ArgumentSchema:
    """The parameters of one tool."""

    def __init__(self, parameters: Mapping[str, Any], *, tool: str = "", also: Collection[str] = ()) -> None:
        """Read a schema.

        Args:
            parameters: The schema of the function's parameters. An argument that it does not name is wrong, unless it has
                additionalProperties.
            tool: The tool's name, for warnings.
            also: Names that are fine although the schema does not have them.
        """
        self._tool = tool
        self._also = frozenset(also)
        self._known = parameters.get("properties") or {}
        self._is_closed = not parameters.get("additionalProperties") and not any(key in parameters for key in _OPEN)
        self._deadline = 0.0
        self._is_warned = False
        base = jsonschema.validators.validator_for(parameters, default=jsonschema.Draft202012Validator)
        checks = {**base.VALIDATORS, **{name: check for name, check in _KEYWORDS.items() if name in base.VALIDATORS}}
        if "patternProperties" in json.dumps(parameters, default=str):
            checks.pop("unevaluatedProperties", None)  # it would run the patterns in Python's engine
        types = base.TYPE_CHECKER.redefine(
            "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
        )
        keywords = {name: self._bounded(check) for name, check in checks.items()}
        validator = jsonschema.validators.create(base.META_SCHEMA, keywords, type_checker=types, id_of=base.ID_OF)
        ordered = {key: parameters[key] for key in sorted(parameters, key=lambda key: key != "required")}
        self._validator = validator(ordered, registry=Registry())

    def problem(self, arguments: Mapping[str, Any]) -> str | None:
        """Return the fault of a call's arguments, for the model to read; None if they fit."""
        known_arguments = {name: value for name, value in arguments.items() if name not in self._also or name in self._known}
        for name in known_arguments if self._is_closed else ():
            if name not in self._known:
                return (
                    f"there is no argument {name!r}.{did_you_mean(name, self._known) if self._known else ' It takes none.'}"
                )
        self._deadline = time.thread_time() + MAX_CPU_S
        try:
            wrong = next(self._validator.iter_errors(known_arguments), None)
        except Exception as problem:  # the schema's fault, whatever it is: the call is not
            if not self._is_warned:
                self._is_warned = True
                why = one_line(problem) or type(problem).__name__
                logger.warning(
                    "the schema of tool %r cannot judge a call, which is left to the tool: %.200s", self._tool, why
                )
            return None
        return None if wrong is None else _sentence(wrong)

    def _bounded(self, check: Callable[..., Any]) -> Callable[..., Iterator[ValidationError]]:
        """Return a keyword's check that ends when the time is over, and that lets null through where it is `nullable`."""

        def bounded(validator: Any, value: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
            if time.thread_time() > self._deadline:
                raise _OutOfTimeError(f"checking takes longer than {MAX_CPU_S} s")
            if instance is not None or not schema.get("nullable"):
                yield from check(validator, value, instance, schema) or ()

        return bounded


@functools.lru_cache(maxsize=1024)
def _matcher(pattern: str) -> Callable[[str], bool]:
    """Return whether a text holds a pattern, found in linear time."""
    return SchemaValidator(core_schema.str_schema(pattern=pattern)).isinstance_python


def _type(validator: Any, kinds: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """Check a type; one that JSON schema does not have lets everything through."""
    with contextlib.suppress(UnknownType):
        if not any(validator.is_type(instance, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
            yield ValidationError("another type")


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not _matcher(pattern)(instance):
        yield ValidationError(f"must match the pattern {pattern!r}, not {show(instance)}")


def _pattern_properties(
    validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any
) -> Iterator[ValidationError]:
    for pattern, of in patterns.items() if isinstance(instance, dict) else ():
        for name in filter(_matcher(pattern), instance):
            yield from validator.descend(instance[name], of, path=name, schema_path=pattern)


def _additional_properties(validator: Any, of: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    patterns = [_matcher(pattern) for pattern in schema.get("patternProperties", ())]
    for name, value in instance.items() if isinstance(instance, dict) else ():
        if name not in schema.get("properties", ()) and not any(match(name) for match in patterns):
            if of is False:
                yield ValidationError("not allowed", path=[name], instance=value)
            else:
                yield from validator.descend(value, of, path=name)


def _unique(validator: Any, is_unique: bool, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if is_unique and isinstance(instance, list):
        seen = {json.dumps(item, sort_keys=True, default=str) for item in instance}
        if len(seen) < len(instance):
            yield ValidationError("must not hold one value twice")


_KEYWORDS: dict[str, Callable[..., Iterator[ValidationError]]] = {
    "type": _type,
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique,
}


def _sentence(error: ValidationError) -> str:
    """Say what is wrong; of several ways to fit, of the one that fits deepest."""
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
        case "additionalProperties":
            return f"there is no argument {path!r}"
        case "pattern" | "uniqueItems":
            return f"{named} {error.message}"
        case "oneOf":  # more than one of them fits
            return f"{named} fits several of the forms of which it must have one: {value_text}"
    return f"{named}: {error.message if len(error.message) <= 200 else '...' + error.message[-197:]}"


def dotted(path: Iterable[str | int]) -> str:
    """Return the path of a value in a call's arguments: points[0].x."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def show(value: Any) -> str:
    """Return a value as the model wrote it, in JSON, cut after 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
