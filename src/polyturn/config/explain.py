"""Turn pydantic's errors into sentences with the key, the value and its source.

    train.steps is 'many' (in run.yaml); it must be a whole number

A value from the environment is shown as the configured expression.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from polyturn.config import schema
from polyturn.config.references import restored, secrets_in, value_at
from polyturn.config.schema import KeyPath, dotted
from polyturn.config.sources import Sources
from polyturn.config.unknown import NUM_LISTED, successor
from polyturn.infra.expected import expected

UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")
"""pydantic's error types for an unknown key of a model, and of a dataclass."""


def explain(
    error: ValidationError,
    model: type,
    values: Mapping[str, Any],
    sources: Sources,
    raw_env: Mapping[KeyPath, str],
) -> list[str]:
    """Return a sentence for each of pydantic's errors, except unknown keys."""
    wrong: dict[KeyPath, list[str]] = {}
    sentences: list[str] = []
    secrets = secrets_in(values, raw_env)
    locations: set[KeyPath] = set()
    explained: set[KeyPath] = set()
    for problem in error.errors(include_url=False):
        path, is_meant = _locate(problem["loc"], model, values)
        locations.add(path)
        if problem["type"] in (*UNKNOWN_KEY, "is_instance_of") or not is_meant:
            continue
        message = expected(problem)
        for secret, raw in secrets.items():
            message = message.replace(secret, raw)
        if problem["type"] == "missing":
            keys = _keys(model, path, None)
            advice = f"give it keys{keys}" if keys else "give it a value"
            sentences.append(f"{dotted(path)!r} is missing{sources.of(path[:-1])}; {advice}")
        elif problem["loc"][-1:] == ("[key]",):
            key = f"{dotted(path[:-1])} has the key {problem['input']!r}{sources.of(path)}"
            sentences.append(f"{key}; a key must be a text; write it in quotes")
        elif problem["type"] in ("value_error", "assertion_error") and isinstance(problem["input"], Mapping):
            name = message.partition(" is ")[0]
            of_name = sources.of((*path, name)) if sources.translated and name in problem["input"] else ""
            sentences.append(f"{dotted(path)}: {message}{of_name}" if path else message)
            explained.add(path)
        else:
            text = message
            if problem["type"] in ("model_type", "model_attributes_type", "dataclass_type"):
                text = f"it must be a section with keys{_keys(model, path, problem['input'])}"
                text += "; remove it for its defaults" if problem["input"] is None else ""
            elif problem["type"] in ("list_type", "tuple_type") and isinstance(problem["input"], str | Mapping):
                entry = problem["input"] if isinstance(problem["input"], str) else "{…}"
                text = f"it must be a list, such as [{entry}]"
            wrong.setdefault(path, []).append(text)
    for path, texts in wrong.items():  # at the end, because a key may have an error for each member of a union
        inside = any(p != path and p[: len(path)] == path for p in locations)
        if path in explained or (inside and isinstance(value_at(values, path), Mapping | list)):
            continue  # it is a section or a list, and the errors inside are reported
        problem_text = " or ".join(dict.fromkeys(texts)).replace(" or it must be", " or")
        value = value_at(values, path)
        if retired := successor(f"{dotted(path)}={value}"):
            problem_text = f"it is no longer supported; {retired}"
        elif problem_text == "it must be a text" and isinstance(value, bool | int | float):
            problem_text = "it must be a text; write it in quotes"
            problem_text += ", because YAML reads on and yes as true, off and no as false" if isinstance(value, bool) else ""
        value_text = as_shown(value, path, raw_env)
        sentences.append(f"{sources.statement(path, value_text)}; {problem_text}")
    return sentences


def _keys(model: type, path: KeyPath, value: Any) -> str:
    """Return a section's keys for a message. If `value` stands in place of the section, name the key that accepts it."""
    annotation: Any = model
    for step in path:
        annotation = schema.child(schema.meant(annotation, {}), step)
    section = next((m for m in schema.unwrap(annotation) if schema.is_model(m)), None)
    if section is None:
        return ""
    keys = schema.keys_of(section)
    known = list(keys)
    known_keys = f" ({', '.join(known[:NUM_LISTED])}{', …' if len(known) > NUM_LISTED else ''})"
    taker = next((name for name, key in keys.items() if key.default in (None, []) and _takes(key.annotation, value)), None)
    return known_keys if taker is None else f"{known_keys}; write {dotted(path)}: {{{taker}: …}}"


def _takes(annotation: Any, value: Any) -> bool:
    """Return whether a key of this type accepts the value, a text or a list of texts."""
    if not isinstance(value, str | list) or not value:
        return False
    try:
        TypeAdapter(annotation).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def _locate(loc: Sequence[str | int], model: type, values: Any) -> tuple[KeyPath, bool]:
    """Turn pydantic's location into a path in the file, without the names of union members.

    The second result is False if the location is inside a union member that the value is not meant for.
    """
    path: KeyPath = ()
    annotation: Any = model
    for position, step in enumerate(loc):
        members = [m.__name__ for m in schema.unwrap(annotation) if schema.is_model(m)]
        of = schema.meant(annotation, values)
        if len(members) > 1 and step in members:
            if step != of.__name__:
                return path, False
            annotation = of
            continue
        is_there = (isinstance(values, Mapping) and step in values) or (
            isinstance(values, list) and isinstance(step, int) and step < len(values)
        )
        if is_there:
            path, annotation, values = (*path, step), schema.child(of, step), values[step]
        elif isinstance(values, str):  # the name of a part
            return path, True
        elif position == len(loc) - 1 and (isinstance(step, int) or (schema.is_model(of) and step in schema.keys_of(of))):
            path = (*path, step)
    return path, True


def as_shown(value: Any, path: KeyPath, raw_env: Mapping[KeyPath, str]) -> str:
    """Return a value for a message, shortened, with the configured expression in place of values from the environment."""
    text = repr(restored(value, raw_env, path))
    return f"{text[:77]}…" if len(text) > 80 else text
