"""`polyturn config`: a config with everything filled in, or the table of all keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from rich.table import Table

from polyturn.cli.console import Output
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.config.schema import schema_table


def run(path: Path | None, overrides: Sequence[str]) -> None:
    """Print the resolved config at `path`, or every key there is."""
    if path is not None:
        print(yaml.safe_dump(load_config(RunConfig, path, overrides).resolved, sort_keys=False), end="")
        return
    table = Table("key", "type", "default", "meaning", box=None, pad_edge=False)
    for row in schema_table(RunConfig):
        table.add_row(row.key, row.type, row.default, f"[{row.of}] {row.doc}" if row.of else row.doc)
    Output().table(table)
