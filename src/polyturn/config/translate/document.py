"""Writes tables of keys as Markdown: the rows of a table, and the fates of the keys of one translated config."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from polyturn.config.translate.table import KeyRule
from polyturn.config.translate.translation import Translation


def rows_as_markdown(rows: Iterable[KeyRule]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    return _markdown(["key", "becomes", ""], (_cells(r) for r in rows))


def fate_table(translation: Translation, *, source: str) -> str:
    """Return the table of one config: first the written keys, then the defaults of the base."""
    lines = [f"# The translation of each key of {source}\n"]
    for title, written in (("Written", True), ("Defaults of the base", False)):
        fates = [f for f in translation.fates if bool(f.where) is written]
        cells = ([f"`{f.key}`", f"`{f.value}`", _targets(f.to) or f.kind, f.says] for f in fates)
        lines += [f"## {title}\n", *_markdown(["key", "value", "became", "why"], cells), ""]
    return "\n".join(lines)


def _cells(row: KeyRule) -> list[str]:
    becomes = f"`{row.means}`" if row.means else _targets(row.to) or row.fate
    return [f"`{row.key}`", becomes, row.says]


def _targets(names: Sequence[str]) -> str:
    return ", ".join(f"`{n}`" for n in names)


def _markdown(head: Sequence[str], rows: Iterator[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for cells in rows:
        yield f"| {' | '.join(c.replace('|', chr(92) + '|').replace(chr(10), ' ') for c in cells)} |"
