"""`polyturn config`: print a config, or the keys of a section or of all sections, or migrate one from another library.

    polyturn config [CONFIG]  ==  polyturn config print [CONFIG]     polyturn config migrate FILE
    polyturn config rollout.limits                                   the keys of a section

Without a command, `print` runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from polyturn.cli.arguments import Command, Overrides, new_file
from polyturn.core.errors import ConfigError, did_you_mean


class DefaultGroup(TyperGroup):
    """A group with the default command "print"."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default command if there is none."""
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = ["print", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(name="config", cls=DefaultGroup, rich_markup_mode=None, add_completion=False)


@app.callback()
def config() -> None:
    """Print a config, or all keys, or migrate another library's."""


@app.command("print", cls=Command)
def config_print(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG|SECTION]",
            help="YAML file, or a section such as rollout.limits, whose keys are listed; without it, every key is listed.",
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Print a config with its defaults, or the keys of a section or of all, each with its type, default and meaning."""
    import yaml
    from rich.table import Table

    from polyturn.cli.console import Output
    from polyturn.cli.dialects import load_native
    from polyturn.config.models import RunConfig
    from polyturn.config.schema import schema_table
    from polyturn.infra.yaml_file import check_config_file

    rows = schema_table(RunConfig)
    if path is not None and _is_file(path):
        print(yaml.safe_dump(load_native(path, overrides or []).resolved, sort_keys=False), end="")
        return
    if path is not None:
        section = str(path)
        known, rows = rows, [r for r in rows if r.key == section or r.key.startswith((f"{section}.", f"{section}["))]
        if not rows:
            if path.is_dir():
                check_config_file(path)
            hint = did_you_mean(section, (row.key for row in known))
            raise ConfigError(f"there is neither a config file nor a section {section!r}.{hint}")
        if overrides:
            raise ConfigError(f"{' '.join(overrides)} has no effect on the keys of the section {section!r}; remove it")
    table = Table("key", "type", "default", "meaning", box=None, pad_edge=False)
    for row in rows:
        table.add_row(row.key, row.type, row.default, f"[{row.of}] {row.doc}" if row.of else row.doc)
    Output().table(table)


def _is_file(path: Path) -> bool:
    """Return whether an argument means a config file or a run's folder, even a missing one, and not a section."""
    text = str(path)
    return path.is_file() or (path / "config.yaml").is_file() or "/" in text or text.endswith((".yaml", ".yml"))


@app.command("migrate", cls=Command)
def config_migrate(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file in the keys of another library.")],
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", callback=new_file, help="The native config to write; FILE with .polyturn.yaml by default."),
    ] = None,
) -> None:
    """Write another library's config as a native one. Prints a table with the translation of each key."""
    from polyturn.cli.dialects import to_migrate

    to_migrate(path)(path, overrides or [], out=out)


main = typer.main.get_command(app)
