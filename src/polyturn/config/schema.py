"""Look into pydantic models: which keys they know, which variant of a union is meant, and a table of every key.

    unknown_keys(RunConfig, {"train": {"step": 3}})  ->  [Unknown(path=("train", "step"), value=3, hint=" Did you …")]
    schema_table(RunConfig)  ->  [Row(key="train.steps", type="int", default="100", doc="Optimizer steps."), …]

Separate from `load.py`, which reads files: this file knows annotations only. Pydantic reports an unknown key inside a
union once per member and without a suggestion; walking the annotations here gives one sentence with the nearest key.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from polyturn.core.errors import did_you_mean

KeyPath = tuple[str | int, ...]
"""Where a value stands: ("rewards", 0, "name")."""


class Unknown(NamedTuple):
    """A key that no model knows."""

    path: KeyPath
    value: Any
    hint: str


class KeyInfo(NamedTuple):
    """One key of a configuration."""

    key: str
    """Dotted; `<name>` stands for any key of a mapping, `[]` for any entry of a list."""
    type: str
    default: str
    """As YAML; "required" where there is none, "" for a section."""
    doc: str


def dotted(path: Sequence[str | int]) -> str:
    """Return a path as it is written on the command line: ("rewards", 0, "name") -> "rewards.0.name"."""
    return ".".join(map(str, path))


def unwrap(annotation: Any) -> list[Any]:
    """Return the members of an annotation: those of a union without None, else the annotation itself."""
    if get_origin(annotation) is Annotated:
        return unwrap(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [m for a in get_args(annotation) if a is not type(None) for m in unwrap(a)]
    return [annotation]


def is_model(annotation: Any) -> bool:
    """Return whether the annotation is a pydantic model class."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def meant(annotation: Any, value: Any) -> Any:
    """Return the member of an annotation that `value` is meant for.

    Among models that is the one whose literals (such as `type: Literal["a"]`) agree with the value and which knows most of
    its keys.
    """
    members = unwrap(annotation)
    if isinstance(value, Mapping):
        models = [m for m in members if is_model(m)]
        if models:
            return min(models, key=lambda m: (_contradictions(m, value), len(value.keys() - set(names(m)))))
        return next((m for m in members if get_origin(m) in (dict, Mapping)), members[0])
    if isinstance(value, list | tuple):
        return next((m for m in members if get_origin(m) in (list, tuple, set, frozenset, Sequence)), members[0])
    return next((m for m in members if not is_model(m)), members[0])


def names(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return every name that a model accepts, aliases included, with its field."""
    known = dict(model.model_fields)
    for field in model.model_fields.values():
        for alias in (field.alias, field.validation_alias):
            if isinstance(alias, str):
                known[alias] = field
    return known


def child(annotation: Any, key: str | int) -> Any:
    """Return the annotation of what stands under `key`; Any where it is not known."""
    if is_model(annotation):
        field = names(annotation).get(str(key))
        return Any if field is None else field.annotation
    args = get_args(annotation)
    if get_origin(annotation) in (dict, Mapping) and len(args) == 2:
        return args[1]
    if get_origin(annotation) is tuple and Ellipsis not in args and isinstance(key, int) and key < len(args):
        return args[key]
    if get_origin(annotation) in (list, tuple, set, frozenset, Sequence) and args:
        return args[0]
    return Any


RETIRED: Mapping[str, str] = {
    "engine.in_process": "leave it out: engine.kind: sglang starts a server beside the trainer (engine.launch)",
}
"""Keys that earlier configurations have, and what stands in their place."""


def with_choices(annotation: Any, value: Any) -> Any:
    """Return `value` with the words that YAML reads as truth values, such as `off`, where a key offers them."""
    if isinstance(value, Mapping):
        of = meant(annotation, value)
        return {key: with_choices(child(of, key), inner) for key, inner in value.items()}
    if isinstance(value, list):
        of = meant(annotation, value)
        return [with_choices(child(of, i), inner) for i, inner in enumerate(value)]
    members = unwrap(annotation)
    choices = [choice for member in members if get_origin(member) is Literal for choice in get_args(member)]
    if not isinstance(value, bool) or bool in members or any(choice is value for choice in choices):
        return value
    return next((word for word in (("on", "yes") if value else ("off", "no")) if word in choices), value)


def unknown_keys(model: type[BaseModel], values: Mapping[str, Any]) -> list[Unknown]:
    """Return every key of `values` that `model` or a model inside it does not know, with the nearest known key."""
    everywhere = [row.key for row in schema_table(model)]
    return list(_unknown(model, values, (), everywhere))


def _unknown(annotation: Any, value: Any, path: KeyPath, everywhere: list[str]) -> Iterator[Unknown]:
    of = meant(annotation, value)
    if isinstance(value, Mapping):
        known = names(of) if is_model(of) else None
        for key, inner in value.items():
            if known is not None and key not in known:
                if of.model_config.get("extra") != "allow":
                    yield Unknown((*path, key), inner, _hint(str(key), known, path, everywhere))
            else:
                yield from _unknown(child(of, key), inner, (*path, key), everywhere)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _unknown(child(of, index), inner, (*path, index), everywhere)


def _hint(key: str, known: Mapping[str, Any], path: KeyPath, everywhere: list[str]) -> str:
    """Say what stands in place of a retired key, or suggest this key of another section, or a near one of the same."""
    if (successor := RETIRED.get(".".join((*map(str, path), key)))) is not None:
        return f" It is no key any more; {successor}."
    elsewhere = sorted((k for k in everywhere if k.rpartition(".")[2] == key), key=lambda k: ("<" in k, "[" in k))
    if elsewhere:
        return f" Did you mean {' or '.join(repr(k) for k in elsewhere[:2])}?"
    hint = did_you_mean(key, known)
    prefix = f"{dotted(path)}." if path else ""
    return re.sub(r"'([^']+)'", rf"'{prefix}\1'", hint) if hint.startswith(" Did") else hint


def _contradictions(model: type[BaseModel], value: Mapping[str, Any]) -> int:
    """Count the fields of `value` that a literal of the model rules out."""
    return sum(
        key in value and get_origin(field.annotation) is Literal and value[key] not in get_args(field.annotation)
        for key, field in names(model).items()
    )


def default_tree(model: type[BaseModel]) -> dict[str, Any]:
    """Return the defaults of a model and of the models inside it as plain data, so that `${…}` can refer to them."""
    tree: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        inner = [m for m in unwrap(field.annotation) if is_model(m)]
        if field.is_required():
            if len(inner) == 1 and is_model(unwrap(field.annotation)[0]):
                tree[name] = default_tree(inner[0])
            continue
        tree[name] = _plain_default(field)
    return tree


def _plain_default(field: FieldInfo) -> Any:
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return json.loads(json.dumps(value, default=_as_text))


def _as_text(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, set | frozenset) else str(value)


def with_instance_defaults(annotation: Any, values: Any) -> Any:
    """Return `values` with what a field's default instance sets beyond its class filled in.

    A field `optim: Optim = Optim(lr=1e-4)` keeps lr 1e-4 when only its weight_decay is configured.
    """
    of = meant(annotation, values)
    if isinstance(values, list):
        return [with_instance_defaults(child(of, index), value) for index, value in enumerate(values)]
    if not isinstance(values, Mapping):
        return values
    filled = {key: with_instance_defaults(child(of, key), value) for key, value in values.items()}
    for key, field in names(of).items() if is_model(of) else ():
        if isinstance(filled.get(key), dict) and not field.is_required():
            default = field.get_default(call_default_factory=True, validated_data={})
            if isinstance(default, BaseModel) and type(default) is meant(field.annotation, filled[key]):
                filled[key] = _over(default.model_dump(mode="json", exclude_unset=True), filled[key])
    return filled


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            merged[key] = _over(below[key], above[key])
    return merged


def schema_table(model: type[BaseModel]) -> list[KeyInfo]:
    """Return a row for every key of `model`, sections first, in the order of the fields."""
    return list(_rows(model, "", (model,)))


def _rows(model: type[BaseModel], prefix: str, above: tuple[type[BaseModel], ...]) -> Iterator[KeyInfo]:
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        inner = list(_inner_models(field.annotation, key))
        doc = " ".join((field.description or "").split())
        if inner and not doc:
            doc = (inner[0][1].__doc__ or "").strip().partition("\n")[0]
        is_section = bool(inner) and inner[0][0] == key
        yield KeyInfo(key, "section" if is_section else type_name(field.annotation), _default_text(field, is_section), doc)
        for at, of in inner:
            if of not in above:
                yield from _rows(of, f"{at}.", (*above, of))


def _inner_models(annotation: Any, key: str) -> Iterator[tuple[str, type[BaseModel]]]:
    for member in unwrap(annotation):
        if is_model(member):
            yield key, member
        elif get_origin(member) in (dict, Mapping):
            yield from _inner_models(child(member, ""), f"{key}.<name>")
        elif get_origin(member) in (list, tuple, Sequence):
            yield from _inner_models(child(member, 0), f"{key}[]")


def _default_text(field: FieldInfo, is_section: bool) -> str:
    if field.is_required():
        return "required"
    if is_section and field.get_default(call_default_factory=True, validated_data={}) is not None:
        return ""
    value = _plain_default(field)
    return "" if value is PydanticUndefined else json.dumps(value, ensure_ascii=False)


def type_name(annotation: Any) -> str:
    """Return an annotation as a person writes it: Optional[Literal["a", "b"]] -> "'a' | 'b' | null"."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(args[0])
    if origin in (Union, types.UnionType):
        return " | ".join(type_name(a) for a in args)
    if origin is Literal:
        return " | ".join(repr(a) for a in args)
    if annotation is type(None):
        return "null"
    if annotation is Any:
        return "any"
    if origin is not None:
        inner = ", ".join("…" if a is Ellipsis else type_name(a) for a in args)
        return f"{origin.__name__}[{inner}]"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
