"""The table of keys: `keys.yaml`, checked, and looked up by key.

    table().find("actor_rollout_ref.rollout.n")  ->  KeyRule(key=…, to=("train.group_size",))

Separate because the translation, the migration and the documentation all read the same rows.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from polyturn.core.errors import did_you_mean

KEYS = Path(__file__).parent / "keys.yaml"
NAMES = Path(__file__).parent / "names.txt"
"""Every key of verl's releases, made by benchmarks/verl_releases.py from their packages: a line for each section of some.

trainer.v1 0.9.0 0.9.1: trainer_mode=other num_steps=null,number      a section, its releases: keys with the kinds of values
"""
NULL, BOOL, NUMBER, OTHER = "null", "bool", "number", "other"
"""The kinds of values: those that a key has in the trees of its releases."""
_IS_NO = {BOOL: "it must be true or false", NUMBER: "it must be a number"}
_BRACES = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRule:
    """The rule for one key, or for every key that fits a pattern."""

    key: str
    to: tuple[str, ...] = ()
    """The native keys that it decides."""
    convert: str | None = None
    """A function of `convert.py`; None moves the value as it is."""
    values: Mapping[Any, Any] | None = None
    """The values that are understood, with their translation."""
    rejected_values: Mapping[Any, str] | None = None
    """Values with which the key is refused, and why; "*" stands for all others."""
    means: str | None = None
    ignored: str | None = None
    rejected: str | None = None
    unless: tuple[Any, ...] = ()
    """Values with which a rejected key asks for nothing."""
    note: str | None = None
    notice: str | None = None
    """A note that the terminal shows too."""
    may_be_null: bool = False
    """Whether null asks for something that no release's tree asks for."""
    native: bool = False
    """The section holds native keys."""

    @property
    def fate(self) -> str:
        """One word for the documentation."""
        if self.native:
            return "native"
        if self.means is not None:
            return "another spelling"
        return "rejected" if self.rejected is not None else "mapped" if self.to else "ignored"

    @property
    def says(self) -> str:
        """The rule in the words of the documentation."""
        parts = [self.rejected or self.ignored or "", self.note or "", self.notice or ""]
        if self.rejected is not None and self.unless:
            parts.append(f"accepted where it asks for nothing: {', '.join(_yaml(v) for v in self.unless)}")
        refusals = (self.rejected_values or {}).items()
        parts += [f"{'anything else' if v == '*' else _yaml(v)} is rejected: {why}" for v, why in refusals]
        return "; ".join(p for p in parts if p)


@dataclass(frozen=True, slots=True)
class Table:
    """All rows, in the order of the file."""

    rows: tuple[KeyRule, ...]
    exact: Mapping[str, KeyRule]
    patterns: tuple[tuple[re.Pattern[str], KeyRule], ...]

    def find(self, key: str) -> KeyRule | None:
        """Return the row of a key: its own, else the first pattern that it fits."""
        if key in self.exact:
            return self.exact[key]
        return next((row for pattern, row in self.patterns if pattern.fullmatch(key)), None)

    def knows(self, key: str) -> bool:
        """Return whether a key has a row, or is a section with keys that have one."""
        return self.find(key) is not None or any(known.startswith(f"{key}.") for known in self.exact)

    def covers(self, key: str) -> bool:
        """Return whether a row speaks of a key, or of a whole section that it is in."""
        if self.knows(key):
            return True
        parts = key.split(".")
        above = (".".join(parts[:i]) for i in range(1, len(parts)))
        return any((row := self.find(a)) is not None and row.means is None and not self.goes_deeper(a) for a in above)

    def goes_deeper(self, key: str) -> bool:
        """Return whether a row speaks of something inside the section `key`."""
        return any(row.key.startswith(f"{key}.") and row.key != f"{key}.**" for row in self.rows)

    def nearest(self, key: str) -> str:
        """Return the end of the message about an unknown key."""
        name = key.rpartition(".")[2]
        same = [k for k in self.exact if k.rpartition(".")[2] == name]
        if same:
            return f" Did you mean {' or '.join(repr(k) for k in same[:2])}?"
        prefix = key.rpartition(".")[0]
        beside = [k for k in self.exact if k.rpartition(".")[0] == prefix]
        hint = did_you_mean(key, beside) if beside else ""
        return hint if hint.startswith(" Did") else did_you_mean(key, self.exact)


@functools.cache
def release_keys() -> Mapping[str, frozenset[str]]:
    """Return every key of the trees of verl's releases, with the releases that have it and the kinds of its values."""
    keys_by_release: dict[str, frozenset[str]] = {}
    for line in NAMES.read_text(encoding="utf-8").splitlines():
        head, _, keys = line.partition(": ")
        section, *releases = head.split()
        for name, _, kinds in (key.partition("=") for key in keys.split()):
            keys_by_release[f"{section}.{name}".removeprefix("-.")] = frozenset((*releases, *kinds.split(",")))
    return keys_by_release


def kind_of(value: Any) -> str:
    """Return the kind of a value."""
    if value is None:
        return NULL
    return BOOL if isinstance(value, bool) else NUMBER if isinstance(value, int | float) else OTHER


def wrong_kind(key: str, value: Any) -> str | None:
    """Return why a value is of no kind that the key can have: null where no release has it, or a word for a number."""
    kinds = release_keys().get(key, frozenset([NULL, OTHER])) & {NULL, BOOL, NUMBER, OTHER}
    if value is None:
        return None if NULL in kinds else "no release of verl has null there; give it a value, or leave the key out"
    meant = kinds - {NULL}
    if value == "" and BOOL in meant:
        return None  # a variable that a script never set, which verl reads as false
    return _IS_NO.get(next(iter(meant))) if len(meant) == 1 and kind_of(value) not in meant else None


def is_of_verl(key: str) -> bool:
    """Return whether a release of verl has the key, or has a mapping above it that starts empty and takes any."""
    parts = key.split(".")
    return any(".".join(parts[:i]) in release_keys() for i in range(1, len(parts) + 1))


@functools.cache
def table() -> Table:
    """Return the table of verl's keys."""
    return read_table(KEYS)


def read_table(*paths: Path) -> Table:
    """Read a table; a row goes before one of its key in a later file."""
    rules: dict[str, KeyRule] = {}
    for path in paths:
        for item in yaml.safe_load(path.read_text(encoding="utf-8")):
            for one in _spread(item):
                rules.setdefault(one["key"], KeyRule(**_row(one)))
    rows = tuple(rules.values())
    exact = {r.key: r for r in rows if "*" not in r.key}
    patterns = [(_pattern(r.key), r) for r in rows if "*" in r.key]
    return Table(rows, exact, tuple(patterns))


def _spread(item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield an item once for each key that its braces stand for."""
    pieces = _BRACES.split(item["key"])
    options = [piece.split(",") if i % 2 else [piece] for i, piece in enumerate(pieces)]
    for chosen in itertools.product(*options):
        yield {**item, "key": "".join(chosen)}


def _row(item: Mapping[str, Any]) -> dict[str, Any]:
    to = item.get("to", ())
    return {**item, "to": (to,) if isinstance(to, str) else tuple(to), "unless": tuple(item.get("unless", ()))}


def _pattern(key: str) -> re.Pattern[str]:
    """Return the pattern for `a.*.b`, `a.**` (the section itself too) and `**.b`."""
    text = re.escape(key).replace(r"\*\*\.", r"(.*\.)?").replace(r"\.\*\*", r"(\..*)?").replace(r"\*", r"[^.]+")
    return re.compile(text)


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...").strip()
