"""Inspect sections: their keys, the member of a union that a value is meant for, and a table of every key.

    meant(SomeEngine | Another, {"kind": "vllm"})  ->  Another
    schema_table(RunConfig)  ->  [KeyInfo(key="train.steps", type="int", default="100", doc="Optimizer steps."), …]

A section is a frozen dataclass of the package that it configures, or a pydantic model.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import json
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from polyturn.infra.live import LiveObject

KeyPath = tuple[str | int, ...]
"""Path of a value: ("rewards", 0, "name")."""
MAX_INT = 2**63 - 1
"""The largest integer of torch and NumPy."""


class KeyInfo(NamedTuple):
    """One key of a configuration."""

    key: str
    """Dotted path; `<name>` stands for any key of a mapping, `[]` for any entry of a list."""
    type: str
    default: str
    """As YAML; "required" without a default, "" for a section."""
    doc: str
    of: str = ""
    """The kinds of the section that have this key; "" if all kinds have it."""
    declared: str = ""
    """The class and field that declare it, the same for all occurrences of the section."""


def dotted(path: Sequence[str | int]) -> str:
    """Return a path in command-line notation: ("rewards", 0, "name") -> "rewards.0.name"."""
    return ".".join(map(str, path))


def unwrap(annotation: Any) -> list[Any]:
    """Return the members of a union without None, or the annotation itself."""
    if get_origin(annotation) is Annotated:
        return unwrap(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [m for a in get_args(annotation) if a is not type(None) for m in unwrap(a)]
    return [annotation]


def is_model(annotation: Any) -> bool:
    """Return whether the annotation is a section: a pydantic model or a dataclass."""
    return isinstance(annotation, type) and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation))


class Key(NamedTuple):
    """One key of a section, with its type, default and meaning."""

    annotation: Any
    default: Any
    """PydanticUndefined if the key is required."""
    doc: str

    @property
    def is_required(self) -> bool:
        """Whether the key is required."""
        return self.default is PydanticUndefined


@functools.cache
def keys_of(section: Any) -> Mapping[str, Key]:
    """Return the keys of a section class, in order."""
    if issubclass(section, BaseModel):
        return {
            name: Key(
                field.annotation,
                PydanticUndefined
                if field.is_required()
                else field.get_default(call_default_factory=True, validated_data={}),
                field.description or "",
            )
            for name, field in section.model_fields.items()
        }
    hints, docs, fields = typing.get_type_hints(section), _docs(section), dataclasses.fields(section)  # type: ignore[arg-type]
    return {field.name: Key(hints[field.name], _default(field), docs.get(field.name, "")) for field in fields}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return PydanticUndefined if field.default is dataclasses.MISSING else field.default


def _docs(section: type) -> dict[str, str]:
    """Return field -> the string below it, for a dataclass and its base classes."""
    docs: dict[str, str] = {}
    # From the source, because Python does not keep docstrings of fields. Base classes first, so that a subclass overrides
    # them.
    for one in reversed([c for c in section.__mro__ if dataclasses.is_dataclass(c)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0]
        assert isinstance(body, ast.ClassDef)
        for node, below in itertools.pairwise(body.body):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                docs[node.target.id] = inspect.cleandoc(str(below.value.value))
    return docs


def meant(annotation: Any, value: Any) -> Any:
    """Return the member of a union that `value` is meant for.

    Among sections, it is the section whose literal (such as `kind: Literal["a"]`) contains the value's `kind`. If there is
    none, it is the section without such a literal. If the value has no `kind`, it is the section with a default kind.
    """
    members = unwrap(annotation)
    if isinstance(value, Mapping):
        sections = [m for m in members if is_model(m)]
        if sections:
            by = distinguishing_key(sections) if len(sections) > 1 else ""
            others = (m for m in sections if by and by not in kinds_of(m))
            return next((m for m in sections if _is_of_kind(m, by, value)), next(others, sections[0]))
        return next((m for m in members if get_origin(m) in (dict, Mapping)), members[0])
    if isinstance(value, list | tuple):
        return next((m for m in members if get_origin(m) in (list, tuple, set, frozenset, Sequence)), members[0])
    return next((m for m in members if not is_model(m)), members[0])


def child(annotation: Any, key: str | int) -> Any:
    """Return the annotation of the value under `key`; Any if it is unknown."""
    if is_model(annotation):
        keys = keys_of(annotation).get(str(key))
        return Any if keys is None else keys.annotation
    args = get_args(annotation)
    if get_origin(annotation) in (dict, Mapping) and len(args) == 2:
        return args[1]
    if get_origin(annotation) is tuple and Ellipsis not in args and isinstance(key, int) and key < len(args):
        return args[key]
    if get_origin(annotation) in (list, tuple, set, frozenset, Sequence) and args:
        return args[0]
    return Any


def mapped(annotation: Any, value: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Return `value` with `change(annotation, value)` in place of every value inside it and of itself, innermost first."""
    if isinstance(value, Mapping | list):
        of = meant(annotation, value)
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        changed = {key: mapped(child(of, key), inner, change) for key, inner in items}
        value = changed if isinstance(value, Mapping) else list(changed.values())
    return change(annotation, value)


def as_word(annotation: Any, value: Any) -> Any:
    """Return a boolean as a word again (YAML reads `off` as false), where the key allows such a word."""
    members = unwrap(annotation)
    choices = [choice for member in members if get_origin(member) is Literal for choice in get_args(member)]
    if not isinstance(value, bool) or bool in members or any(choice is value for choice in choices):
        return value
    return next((word for word in (("on", "yes") if value else ("off", "no")) if word in choices), value)


def without_other_kinds(annotation: Any, value: Any) -> Any:
    """Return a section without the null keys that only other kinds of the section have.

    So an override can remove a key of a file: `engine.kind=embedded engine.launch=null`.
    """
    of = meant(annotation, value)
    if not isinstance(value, Mapping) or not is_model(of):
        return value
    # Only null is removed; any other value is an error with a message.
    others = {key for m in unwrap(annotation) if is_model(m) for key in keys_of(m).keys() - keys_of(of)}
    return {key: inner for key, inner in value.items() if inner is not None or key not in others}


def no_numbers(annotation: Any, value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield path and reason for invalid values that pydantic accepts as numbers: booleans, and numbers too large."""
    if isinstance(value, Mapping | list):
        of = meant(annotation, value)
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from no_numbers(child(of, key), inner, (*path, key))
    members = unwrap(annotation)
    if isinstance(value, bool) and bool not in members and (int in members or float in members):
        yield path, "it must be a number; YAML reads on and yes as true, off and no as false"
    elif isinstance(value, int) and int in members and abs(value) > MAX_INT:
        yield path, f"it must be at most {MAX_INT}"


def takes_more(section: type) -> bool:
    """Return whether a section accepts undeclared keys."""
    return issubclass(section, BaseModel) and section.model_config.get("extra") == "allow"


def _is_of_kind(section: type, by: str, value: Mapping[str, Any]) -> bool:
    """Return whether `value` has a kind of the section, or no kind and the section has a default kind."""
    kinds = kinds_of(section).get(by, ())
    return value[by] in kinds if by in value else bool(kinds) and not keys_of(section)[by].is_required


def kinds_of(section: type) -> dict[str, tuple[str, ...]]:
    """Return the keys with literal values that may distinguish a section from others: {"kind": ("vllm", "sglang")}."""
    keys = keys_of(section)
    return {name: get_args(key.annotation) for name, key in keys.items() if get_origin(key.annotation) is Literal}


def distinguishing_key(sections: Sequence[type]) -> str:
    """Return the key whose values distinguish the sections of a union, such as `kind`."""
    common = set.intersection(*(set(keys_of(section)) for section in sections))
    for name in keys_of(sections[0]):  # in the order of declaration, in which the distinguishing key is first
        values = [kinds_of(section).get(name) for section in sections]
        if name in common and len(set(values)) == len(sections):
            return name
    return ""


def default_tree(model: type) -> dict[str, Any]:
    """Return the defaults of a model and its submodels as plain data, so that `${…}` can refer to them."""
    tree: dict[str, Any] = {}
    for name, key in keys_of(model).items():
        inner = [m for m in unwrap(key.annotation) if is_model(m)]
        if key.is_required:
            if len(inner) == 1 and is_model(unwrap(key.annotation)[0]):
                tree[name] = default_tree(inner[0])
            continue
        tree[name] = _plain(key.default)
    return tree


def _plain(value: Any) -> Any:
    return to_jsonable_python(value, fallback=str)


def with_instance_defaults(annotation: Any, value: Any) -> Any:
    """Return a section with the values that a field's default instance sets differently from its class.

    A field `optim: Optim = Optim(lr=1e-4)` keeps lr 1e-4 when only its weight_decay is configured.
    """
    of = meant(annotation, value)
    if not isinstance(value, Mapping) or not is_model(of):
        return value
    filled = dict(value)
    for name, key in keys_of(of).items():
        inner, default = value.get(name), key.default
        if isinstance(inner, dict) and is_model(type(default)) and type(default) is meant(key.annotation, inner):
            filled[name] = _over(_beyond_class(default), inner)
    return filled


def _beyond_class(section: Any) -> dict[str, Any]:
    """Return the values of an instance that differ from the defaults of its class."""
    data = _plain(section)
    return {
        name: data[name]
        for name, key in keys_of(cast(Any, type(section))).items()
        if key.is_required or data[name] != _plain(key.default)
    }


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            merged[key] = _over(below[key], above[key])
    return merged


def schema_table(model: type) -> list[KeyInfo]:
    """Return a row for every key of `model`, sections first, in the order of the fields."""
    return list(_rows(model, "", (model,), None))


def _rows(model: type, prefix: str, above: tuple[type, ...], instance: Any) -> Iterator[KeyInfo]:
    """Yield the rows of a section; `instance`, if given, has the defaults."""
    for name, keys in keys_of(model).items():
        if type(instance) is model:
            keys = keys._replace(default=getattr(instance, name))
        key = f"{prefix}{name}"
        inner = list(_inner_models(keys.annotation, key))
        doc = " ".join(keys.doc.split())
        if inner and not doc:
            doc = (inner[0][1].__doc__ or "").strip().partition("\n")[0]
        is_section = bool(inner) and inner[0][0] == key
        kind = "section" if is_section else type_name(keys.annotation)
        if is_section and all("name" in keys_of(of) for at, of in inner if at == key):
            kind = "name | section"
        of_kind = " or ".join(getattr(model, "ONLY", {}).get(name, ()))
        yield KeyInfo(key, kind, _default_text(keys, is_section), doc, of=of_kind, declared=_declaration(model, name))
        sections_at: dict[str, list[type]] = {}
        for at, of in inner:
            if of not in above:
                sections_at.setdefault(at, []).append(of)
        for at, sections in sections_at.items():
            yield from _rows_of_kinds(sections, f"{at}.", above, keys.default if at == key else None)


def _declaration(model: type, name: str) -> str:
    owner = next(cls for cls in reversed(model.__mro__) if name in vars(cls).get("__annotations__", {}))
    return f"{owner.__qualname__}.{name}"


def _rows_of_kinds(sections: Sequence[type], prefix: str, above: tuple[type, ...], instance: Any) -> Iterator[KeyInfo]:
    """Yield the rows of a section with several kinds: first the keys of all kinds, then the keys of some kinds."""
    tables = {section: list(_rows(section, prefix, (*above, section), instance)) for section in sections}
    common = set.intersection(*({row.key for row in rows} for rows in tables.values()))
    by = distinguishing_key(sections)
    part = getattr(sections[0], "PART", "")
    for row in tables[sections[0]]:
        if row.key in common:
            types = dict.fromkeys(r.type for rows in tables.values() for r in rows if r.key == row.key)
            of = "" if row.key == f"{prefix}name" else part
            yield row._replace(type=" | ".join(types), of=row.of or of)
    for section, rows in tables.items():
        kinds = ", ".join(kinds_of(section).get(by, ())) or "another"
        yield from (row if row.of else row._replace(of=kinds) for row in rows if row.key not in common)


def _inner_models(annotation: Any, key: str) -> Iterator[tuple[str, type]]:
    for member in unwrap(annotation):
        if is_model(member):
            yield key, member
        elif get_origin(member) in (dict, Mapping):
            yield from _inner_models(child(member, ""), f"{key}.<name>")
        elif get_origin(member) in (list, tuple, Sequence):
            yield from _inner_models(child(member, 0), f"{key}[]")


def _default_text(key: Key, is_section: bool) -> str:
    if key.is_required:
        return "required"
    return "" if is_section and key.default is not None else json.dumps(_plain(key.default), ensure_ascii=False)


def type_name(annotation: Any) -> str:
    """Return an annotation in readable notation: Optional[Literal["a", "b"]] -> "'a' | 'b' | null"."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(args[0])
    if origin in (Union, types.UnionType):
        return " | ".join(type_name(a) for a in args if a is not LiveObject)
    if origin is Literal:
        return " | ".join(repr(a) for a in args)
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " | ".join(repr(choice.value) for choice in annotation)
    if annotation is Any:
        return "any"
    if origin is not None:
        inner = ", ".join("…" if a is Ellipsis else type_name(a) for a in args)
        return f"{origin.__name__}[{inner}]"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
