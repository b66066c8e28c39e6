"""Translates a tree of another trainer's keys to a native configuration, with the fate of every key.

    translate(tree, keys=…, converters=…)  ->  Translation(native={"train": …}, fates=[KeyStatus("rollout.n", …)], …)

Every key that a file or an override wrote is mapped, ignored with a reason, or an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyturn.config.models import AlgorithmConfig
from polyturn.config.schema import child, keys_of, meant, takes_more
from polyturn.config.translate.source import Source
from polyturn.config.translate.table import KeyRule, Table
from polyturn.config.translate.tree import Composed, Unresolved, leaves
from polyturn.core.errors import ConfigError, PolyturnError, did_you_mean, one_line

UNREAD = "this config uses no part that reads it"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStatus:
    """The fate of one key in a translation."""

    key: str
    value: Any
    kind: str
    """"mapped", "ignored" or "native"."""
    to: tuple[str, ...] = ()
    notice: str = ""
    """The reason, if the user should read it."""
    says: str = ""
    """The reason, or the table's note."""
    where: str = ""
    """The file or override that wrote the key; empty for the shipped base."""
    written: tuple[str, ...] = ()
    """The keys that a file or an override wrote: the key itself, or those inside it if it is a section."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A native configuration and its origins."""

    native: dict[str, Any]
    origin: Mapping[tuple[str | int, ...], str]
    """Native key -> the original key and where it was written, for messages."""
    paths: tuple[tuple[str, ...], ...]
    """Native keys whose values are paths, relative to the working directory."""
    native_paths: tuple[tuple[str, ...], ...]
    """Keys set by the section `polyturn`; paths in their values are relative to the config's folder."""
    fates: tuple[KeyStatus, ...]

    def notices(self) -> list[str]:
        """Return one line per reason that the user should read."""
        notes: dict[str, list[str]] = {}
        for fate in self.fates:
            if fate.where and fate.notice:
                notes.setdefault(f"{'ignored: ' if fate.kind == 'ignored' else ''}{fate.notice}", []).extend(fate.written)
        return [f"{', '.join(keys)}: {reason}" for reason, keys in notes.items()]


def translate(
    tree: Composed,
    *,
    keys: Table,
    converters: Mapping[str, Callable[[Source], None]],
    check: Callable[[Composed, str, Any, KeyRule], Sequence[str]] = lambda tree, key, value, rule: (),
    wrong_kind: Callable[[str, Any], str | None] = lambda key, value: None,
) -> Translation:
    """Translate a composed tree.

    Args:
        tree: The tree.
        keys: The table of keys.
        converters: Name -> function, for the table.
        check: Called with the tree, a key, its value and its row; returns one sentence per problem.
        wrong_kind: Returns the reason why a key cannot have this kind of value, or None.

    Raises:
        ConfigError: a key is unknown, unsupported, or contradicts another; one line each.
    """
    source = Source()
    problems = list(_collect(tree, source, keys, check))
    refused: list[tuple[str, str]] = []
    wanted: dict[str, None] = {}
    for key, value in source.values.items():
        row = keys.find(key)
        if row is None or row.native:
            continue
        if (why := _refusal(key, value, row) or _wrong_kind(key, value, row, tree, wrong_kind)) is not None:
            refused.append((key, why))
        elif row.convert is not None:
            wanted[row.convert] = None
        elif row.to and value is not None:
            source.put(row.to[0], value if row.values is None else row.values[value], by=key)
    if not problems and not refused:
        for name in wanted:
            try:
                converters[name](source)
            except PolyturnError:
                raise
            except (ArithmeticError, AttributeError, OSError, LookupError, RuntimeError, TypeError, ValueError) as problem:
                read = [k for k in source.values if (row := keys.find(k)) is not None and row.convert == name]
                values = ", ".join(f"{k} = {_show(source.values[k])}" for k in read)
                raise ConfigError(f"one of {values} is invalid ({one_line(problem):.200}); correct it") from problem
        refused = source.problems
    problems += _sentences(refused, source.values, tree)
    section = source.values.get("polyturn")
    if section is not None and not isinstance(section, Mapping):
        problems.append(f"polyturn is {_show(section)}{tree.where('polyturn')}; it is a section of native keys")
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    own = [(path, value) for path, value in leaves(section) if path]
    for path, value in own:
        source.put(".".join(path), value, by=f"polyturn.{'.'.join(path)}")
    _move_slots_to_servers(source, {path for path, _ in own})
    _without_unread(source, {path for path, _ in own})
    return Translation(
        native=source.native,
        origin={path: f"{key}{tree.where(key)}" for path, key in source.origin.items()},
        paths=tuple(path for path in source.paths if path not in dict(own)),
        native_paths=tuple(path for path, _ in own),
        fates=tuple(_fates(tree, source, keys)),
    )


def _move_slots_to_servers(source: Source, own: Collection[Sequence[Any]]) -> None:
    """If servers sample, move the number of concurrent sequences from `num_slots` to `max_in_flight`."""
    engine, slots = source.native.get("engine"), ("engine", "num_slots")
    if isinstance(engine, dict) and engine.get("kind") in ("vllm", "sglang") and slots in source.origin and slots not in own:
        by, number = source.origin.pop(slots), engine.pop("num_slots")
        if "max_in_flight" not in engine:
            source.put("engine.max_in_flight", number, by=by)


def _without_unread(source: Source, own: Collection[Sequence[Any]]) -> None:
    """Remove arguments that the named estimator and loss do not have, with a note."""
    algorithm = source.native.get("algorithm", {})
    for name in ("advantage", "loss") if isinstance(algorithm, dict) else ():
        part, annotation = algorithm.get(name), child(AlgorithmConfig, name)
        of = meant(annotation, part) if isinstance(part, dict) else None
        for key in [] if of is None or takes_more(of) else [k for k in part if k not in keys_of(of)]:
            if (path := ("algorithm", name, key)) not in own:
                by = source.origin.pop(path)
                source.notes[by] = f"{part.get('name')} does not read it"
                del part[key]


def _collect(
    tree: Composed, source: Source, known: Table, check: Callable[[Composed, str, Any, KeyRule], Sequence[str]]
) -> Iterator[str]:
    """Fill `source.values`, and yield a sentence per key that is unknown, wrong, unresolved or set twice."""
    aliases: list[tuple[str, Any, KeyRule]] = []
    for key, value in _keys(tree.values, known):
        row = known.find(key)
        if row is None:
            yield f"unknown key {key!r}, set to {_show(value)}{tree.where(key)}.{known.nearest(key)}"
        elif wrong := check(tree, key, value, row):
            yield from wrong
        elif missing := list(_without_value(key, value, row, tree)):
            yield from missing
        elif isinstance(value, Unresolved):
            continue  # a default, which has no effect here
        elif row.means is not None:
            aliases.append((key, value, row))
        else:
            source.values[key] = _resolved(value)
            if tree.is_written(key):
                source.written.add(key)
    for key, value, row in aliases:
        target = row.means or ""
        source.values[key] = value
        if value is None:
            continue
        other = source.values.get(target) if target in source.written else None
        mine, theirs = tree.where(key), tree.where(target)
        if other is not None and other != value and _is_override(mine) == _is_override(theirs):
            why = f"and {target}, which means the same, is {other!r}; keep one"
            yield from _sentences([(key, why)], {key: value}, tree)
        if other is None or _is_override(mine) or not _is_override(theirs):
            source.values[target] = value
            source.written.add(target)


def _without_value(key: str, value: Any, row: KeyRule, tree: Composed) -> Iterator[str]:
    """Yield a sentence for each unresolved value, also inside a section, that was written or is used."""
    for path, one in leaves(value):
        name = ".".join((key, *path))
        if isinstance(one, Unresolved) and (row.ignored is None or (one != "???" and tree.is_written(name))):
            what = "has no value yet" if one == "???" else "cannot be resolved: it refers to a key that has no value"
            yield f"{name} is {str(one)!r}{tree.where(name)}, which {what}; give it a value"


def _resolved(value: Any) -> Any:
    """Return a value; unresolved values in a section are left out."""
    if not isinstance(value, Mapping):
        return value
    return {name: _resolved(one) for name, one in value.items() if not isinstance(one, Unresolved)}


def _is_override(where: str) -> bool:
    return where.startswith(" (from the override")


def _keys(values: Mapping[str, Any], known: Table, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield every key with its value, at the depth of the table's rows."""
    for name, value in values.items():
        key = ".".join((*path, str(name)))
        row = known.find(key)
        is_section = isinstance(value, Mapping) and bool(value)
        if is_section and (row is None or known.goes_deeper(key)):
            yield from _keys(value, known, (*path, str(name)))
        elif row is not None or value or not known.knows(key):  # otherwise it is an empty `section:`
            yield key, value


def _refusal(key: str, value: Any, row: KeyRule) -> str | None:
    """Return why a key with this value is not supported, or None."""
    if row.rejected is not None:
        is_nothing = any(_same(value, v) for v in row.unless) or (
            isinstance(value, Mapping)
            and None in row.unless
            and not any(v for path, v in leaves(value) if path[-1:] != ("_target_",))
        )
        return None if is_nothing else row.rejected
    for one in value if isinstance(value, list) and not row.to else [value]:
        for refused, why in (row.rejected_values or {}).items():
            if _same(one, refused) or (refused == "*" and not any(_same(one, v) for v in row.values or {})):
                return why
        if row.values is not None and one is not None and not any(_same(one, v) for v in row.values):
            what = "this value" if one is value else _show(one)
            return f"{what} is not supported.{did_you_mean(str(one), map(str, row.values))}"
    return None


def _wrong_kind(
    key: str, value: Any, row: KeyRule, tree: Composed, wrong_kind: Callable[[str, Any], str | None]
) -> str | None:
    """Return an error for a written value of the wrong kind; keys without effect also accept null."""
    if row.to or row.means is not None:
        null_pairs = [] if value is None and row.may_be_null else [(key, value)]
    else:
        nulls = leaves(value) if row.rejected is not None else ()
        null_pairs = [(".".join((key, *path)), one) for path, one in nulls if one is None]
    return next((why for k, one in null_pairs if tree.is_written(k) and (why := wrong_kind(k, one)) is not None), None)


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _fates(tree: Composed, source: Source, known: Table) -> Iterator[KeyStatus]:
    for key, value in source.values.items():
        row = known.find(key)
        if row is None:
            continue
        where = tree.where(key) if tree.is_written(key) else ""
        own = (row.ignored, row.notice if value is not None else None)
        notice = source.notes.get(key) or "; ".join(text for text in own if text)
        if row.convert is not None and value is not None and not notice and key not in source.read:
            notice = UNREAD
        nothing = "it has no effect" if row.rejected is not None else ""
        if isinstance(value, Mapping) and any(v for _, v in leaves(value)):
            notice = notice or nothing  # a section that only names its class
        target = known.find(row.means) if row.means is not None else None
        kind = "native" if row.native else "mapped" if row.to or target is not None else "ignored"
        kind = "ignored" if notice == UNREAD else kind
        below = (".".join((key, *path)) for path, _ in leaves(value) if path) if kind == "ignored" else ()
        yield KeyStatus(
            key=key,
            value=value,
            kind=kind,
            to=target.to if target is not None else row.to,
            notice=notice,
            says=notice or row.note or nothing,
            where=where.strip(" ()"),
            written=tuple(k for k in below if tree.is_written(k)) or (key,),
        )


def _sentences(refused: Sequence[tuple[str, str]], settings: Mapping[str, Any], tree: Composed) -> list[str]:
    """Return one sentence per reason, with all keys that share it."""
    by_reason: dict[str, list[str]] = {}
    for key, why in refused:
        by_reason.setdefault(why, []).append(f"{key} is {_show(settings.get(key))}{tree.where(key)}")
    return [f"{'; '.join(dict.fromkeys(keys))}: {why}" for why, keys in by_reason.items()]


def _show(value: Any) -> str:
    text = repr(value)
    return f"{text[:77]}…" if len(text) > 80 else text
