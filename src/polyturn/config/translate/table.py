"""A checked table of another trainer's keys, read from YAML, with look-up by key.

read_table(path).find("trainer.steps")  ->  KeyRule(key=…, to=("train.steps",))
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from polyturn.core.errors import did_you_mean

_BRACES = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRule:
    """The rule for one key, or for all keys that match a pattern."""

    key: str
    to: tuple[str, ...] = ()
    """The native keys that the key determines."""
    convert: str | None = None
    """The name of a converter; None moves the value unchanged."""
    values: Mapping[Any, Any] | None = None
    """Supported value -> native value."""
    rejected_values: Mapping[Any, str] | None = None
    """Refused value -> reason; "*" matches all other values."""
    means: str | None = None
    """Another key with the same meaning; this one is an alias of it."""
    ignored: str | None = None
    rejected: str | None = None
    unless: tuple[Any, ...] = ()
    """Values without effect, with which a rejected key is accepted."""
    note: str | None = None
    notice: str | None = None
    """A note that is also shown in the terminal."""
    may_be_null: bool = False
    """Whether null is accepted although no release of the other trainer has null as the key's default."""
    native: bool = False
    """Whether the section has native keys."""

    @property
    def fate(self) -> str:
        """The rule's kind in one word, for the documentation."""
        if self.native:
            return "native"
        if self.means is not None:
            return "another spelling"
        return "rejected" if self.rejected is not None else "mapped" if self.to else "ignored"

    @property
    def says(self) -> str:
        """The rule's text for the documentation."""
        parts = [self.rejected or self.ignored or "", self.note or "", self.notice or ""]
        if self.rejected is not None and self.unless:
            parts.append(f"accepted without effect: {', '.join(_yaml(v) for v in self.unless)}")
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
        """Return the row of a key: its own row, or else the row of the first pattern that matches."""
        if key in self.exact:
            return self.exact[key]
        return next((row for pattern, row in self.patterns if pattern.fullmatch(key)), None)

    def knows(self, key: str) -> bool:
        """Return whether a key has a row, or is a section of such keys."""
        return self.find(key) is not None or any(known.startswith(f"{key}.") for known in self.exact)

    def covers(self, key: str) -> bool:
        """Return whether a key, or a section that contains it, has a row."""
        if self.knows(key):
            return True
        parts = key.split(".")
        above = (".".join(parts[:i]) for i in range(1, len(parts)))
        return any((row := self.find(a)) is not None and row.means is None and not self.goes_deeper(a) for a in above)

    def goes_deeper(self, key: str) -> bool:
        """Return whether a key inside the section `key` has a row."""
        return any(row.key.startswith(f"{key}.") and row.key != f"{key}.**" for row in self.rows)

    def nearest(self, key: str) -> str:
        """Return the hint for the message about an unknown key."""
        name = key.rpartition(".")[2]
        same = [k for k in self.exact if k.rpartition(".")[2] == name]
        if same:
            return f" Did you mean {' or '.join(repr(k) for k in same[:2])}?"
        prefix = key.rpartition(".")[0]
        beside = [k for k in self.exact if k.rpartition(".")[0] == prefix]
        hint = did_you_mean(key, beside) if beside else ""
        return hint if hint.startswith(" Did") else did_you_mean(key, self.exact)


def read_table(*paths: Path) -> Table:
    """Read a table from files; a row takes precedence over rows with the same key in later files."""
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
    """Yield an item once for each key in its braces."""
    pieces = _BRACES.split(item["key"])
    options = [piece.split(",") if i % 2 else [piece] for i, piece in enumerate(pieces)]
    for chosen in itertools.product(*options):
        yield {**item, "key": "".join(chosen)}


def _row(item: Mapping[str, Any]) -> dict[str, Any]:
    to = item.get("to", ())
    return {**item, "to": (to,) if isinstance(to, str) else tuple(to), "unless": tuple(item.get("unless", ()))}


def _pattern(key: str) -> re.Pattern[str]:
    """Return the pattern for `a.*.b`, `a.**` (including the section itself) and `**.b`."""
    text = re.escape(key).replace(r"\*\*\.", r"(.*\.)?").replace(r"\.\*\*", r"(\..*)?").replace(r"\*", r"[^.]+")
    return re.compile(text)


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...").strip()
