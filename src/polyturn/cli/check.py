"""`polyturn check`: what a model's chat template does, as one table, and whether a run with tools can use it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rich.table import Table

from polyturn.cli.console import Output, quiet_transformers
from polyturn.core.errors import ConfigError
from polyturn.tokens.codec import load_codec
from polyturn.tokens.sanity import probe


def run(model: str, *, template: Path | None) -> None:
    """Print the table.

    Raises:
        TemplateError: the template cannot be used.
    """
    quiet_transformers()
    if template is not None and not template.is_file():
        raise ConfigError(f"there is no file {str(template)!r}; --template names a Jinja file")
    codec = load_codec(model, chat_template=None if template is None else template.read_text(encoding="utf-8"))
    report = probe(codec)
    table = Table("property", "value", box=None, pad_edge=False)
    for field in dataclasses.fields(report):
        value = getattr(report, field.name)
        shown = {True: "yes", False: "no", None: "-"}.get(value, str(value)) if not isinstance(value, str) else value
        table.add_row(field.name.replace("_", " "), shown)
    table.add_row("stop tokens", " ".join(codec.decode([i]) for i in codec.stop_token_ids))
    Output().table(table)
    report.require()
