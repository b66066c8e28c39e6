"""Writes the table of all keys as Markdown: docs/migrate/verl-keys.md.

python -m polyturn.compat.verl_config.document > docs/migrate/verl-keys.md   (`make docs` does it)
"""

from __future__ import annotations

import itertools
import sys

from polyturn.compat.verl_config.table import table
from polyturn.config.translate.document import rows_as_markdown
from polyturn.config.translate.table import KeyRule

_HEAD = """\
# verl's keys

Every key of a verl config, with its native keys. Generated from `src/polyturn/compat/verl_config/keys.yaml` by
`python -m polyturn.compat.verl_config.document`; `polyturn config migrate FILE` writes the same table for one config.
An unknown key is an error that names the nearest known key. `**` stands for everything below a section.
"""


def key_table() -> str:
    """Return the page of all keys."""
    lines = [_HEAD]
    for section, rows in itertools.groupby(table().rows, key=_section):
        lines += [f"\n## {section}\n", *rows_as_markdown(rows)]
    return "\n".join(lines) + "\n"


def _section(row: KeyRule) -> str:
    parts = row.key.split(".")
    if parts[0] != "actor_rollout_ref" or len(parts) < 3:
        return parts[0]
    return ".".join(parts[:3] if parts[2] == "multi_turn" else parts[:2])


if __name__ == "__main__":
    sys.stdout.write(key_table())
