"""Writes tables of keys as Markdown: all keys (docs/migrate/verl-keys.md), and the keys of one translated config.

python -m polyturn.compat.verl_config.document > docs/migrate/verl-keys.md   (`make docs` does it)
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence

from polyturn.compat.verl_config.table import KeyRule, table
from polyturn.compat.verl_config.translate import Translation

_HEAD = """\
# verl's keys

What becomes of every key of a verl config. Made from `src/polyturn/compat/verl_config/keys.yaml` by
`python -m polyturn.compat.verl_config.document`; `polyturn config migrate FILE` makes the same table for one config.
An unknown key is an error that names the nearest known key. `**` stands for everything below a section.
"""


def key_table() -> str:
    """Return the page of all keys."""
    lines = [_HEAD]
    for section, rows in itertools.groupby(table().rows, key=_section):
        lines += [f"\n## {section}\n", *rows_as_markdown(rows)]
    return "\n".join(lines) + "\n"


def rows_as_markdown(rows: Iterable[KeyRule]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    return _markdown(["key", "becomes", ""], (_cells(r) for r in rows))


def fate_table(translation: Translation, *, source: str) -> str:
    """Return the table of one config: first the written keys, then the defaults with an effect."""
    lines = [f"# What became of each key of {source}\n"]
    for title, written in (("Written", True), ("Defaults of the base", False)):
        fates = [f for f in translation.fates if bool(f.where) is written]
        cells = ([f"`{f.key}`", f"`{f.value}`", _targets(f.to) or f.kind, f.says] for f in fates)
        lines += [f"## {title}\n", *_markdown(["key", "value", "became", "why"], cells), ""]
    return "\n".join(lines)


def _section(row: KeyRule) -> str:
    parts = row.key.split(".")
    if parts[0] != "actor_rollout_ref" or len(parts) < 3:
        return parts[0]
    return ".".join(parts[:3] if parts[2] == "multi_turn" else parts[:2])


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


if __name__ == "__main__":
    sys.stdout.write(key_table())
