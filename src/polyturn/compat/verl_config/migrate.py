"""`polyturn config migrate`: translates a config with verl's keys to a native one, with a table of all keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from polyturn.cli.console import Output, command
from polyturn.compat.verl_config.compose import compose_file
from polyturn.compat.verl_config.translate import translate
from polyturn.config.load import load_values
from polyturn.config.models import RunConfig
from polyturn.config.schema import default_tree
from polyturn.config.translate.document import fate_table
from polyturn.config.translate.paths import relative_to
from polyturn.core.errors import ConfigError
from polyturn.infra.writable import check_file_writable
from polyturn.infra.yaml_file import check_config_file


def run(path: Path, overrides: Sequence[str], *, out: Path | None) -> None:
    """Write the native config and the table next to it; print the written keys.

    Raises:
        ConfigError: the config cannot be translated, or the output is not a YAML file or would overwrite the config.
    """
    check_config_file(path)
    target = path.with_suffix(".polyturn.yaml") if out is None else out
    if target.suffix != ".yaml" or target.resolve() == path.resolve():
        raise ConfigError(f"--out is {str(target)!r}; name a .yaml file other than the config")
    notes = target.with_suffix(".md")
    for file in (target, notes):
        check_file_writable(file, instead="name another --out")
    translation = translate(compose_file(path, overrides))
    load_values(RunConfig, translation.native, origin=translation.origin)
    target.parent.mkdir(parents=True, exist_ok=True)
    native = _without_defaults(relative_to(translation, target.parent, config=path.parent), default_tree(RunConfig))
    source = "".join(c if c.isprintable() else " " for c in " ".join([str(path), *overrides]))
    head = f"# Made from {source} by `polyturn config migrate`; paths start from this file's folder.\n"
    target.write_text(head + yaml.safe_dump(native, sort_keys=False, allow_unicode=True, width=1000), encoding="utf-8")
    notes.write_text(fate_table(translation, source=source), encoding="utf-8")
    console = Output()
    table = Table(box=None, pad_edge=False)
    table.add_column("key", no_wrap=True)
    table.add_column("value", overflow="fold", max_width=24)
    table.add_column("became", overflow="fold")
    table.add_column("why")
    for fate in translation.fates:
        if fate.where:
            table.add_row(fate.key, str(fate.value), ", ".join(fate.to) or fate.kind, fate.says)
    console.table(table)
    console.fact("config", target)
    console.fact("every key", notes)
    console.fact("train it", command("train", target))


def _without_defaults(values: dict[str, Any], defaults: Any) -> dict[str, Any]:
    """Return the values that differ from the defaults."""
    kept: dict[str, Any] = {}
    for key, value in values.items():
        default = defaults.get(key) if isinstance(defaults, dict) else None
        if isinstance(value, dict):
            rest = _without_defaults(value, default)
            if rest or not isinstance(default, dict):  # keep an empty mapping of a plug-in's arguments
                kept[key] = rest
        elif value != default or not isinstance(defaults, dict) or key not in defaults:
            kept[key] = value
    return kept
