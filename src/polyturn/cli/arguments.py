"""Arguments that several commands take, each with one help text."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from polyturn.core.errors import ConfigError
from polyturn.infra.writable import check_file_writable, check_writable


def new_folder(folder: Path) -> Path:
    """Return the folder that a command is to write; refused first where it could not be.

    Raises:
        ConfigError: it cannot be made or written.
    """
    check_writable(folder)
    return folder


def new_file(file: Path | None) -> Path | None:
    """Return the file that a command is to write, if it is to write one; refused first where it could not be.

    Raises:
        ConfigError: it cannot be written.
    """
    if file is not None:
        check_file_writable(file)
    return file


def refuse_unused(context: typer.Context, used: Collection[str], *, here: str) -> None:
    """Refuse what was given on the command line and has no meaning beside what else was.

    Args:
        context: The command's.
        used: The names of its parameters that have one.
        here: What was given beside it, for the message.

    Raises:
        ConfigError: the first one that has none.
    """
    for parameter in context.command.params:
        name = str(parameter.name)
        is_given = getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
        if is_given and name not in used and context.params[name]:
            written = (
                " ".join(context.params[name]) if parameter.param_type_name == "argument" else max(parameter.opts, key=len)
            )
            raise ConfigError(f"{written} means nothing {here}; leave it out")


ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE|FILE]...", help="Keys to override, train.steps=10, or YAML files to lay above."),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, for instance runs/quickstart.")]
HostOption = Annotated[str, typer.Option(help="Address to listen on; beyond this machine a token is demanded.")]
PortOption = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="The port, and no other; without it, the first free one from the usual one on."),
]
PageTokenFile = Annotated[Path | None, typer.Option(help="File with the token; else one is made where it is needed.")]
RateLimitOption = Annotated[
    str | None, typer.Option(help="How often one client may ask: 20/s, 600/min, 600/min:50 (with bursts of 50).")
]
AllowHosts = Annotated[
    list[str] | None,
    typer.Option(help="Further name under which the server is reached, as by a proxy; may be repeated."),
]
EmbedOption = Annotated[
    str | None,
    typer.Option(help="Who turns texts into vectors: the URL of an OpenAI-compatible endpoint, or file.py:function."),
]
EmbedModelOption = Annotated[str | None, typer.Option(help="With --embed URL: the model's name there.")]
CheckpointOption = Annotated[
    Path | None,
    typer.Option("--checkpoint", help="Folder of a Hugging Face model, a checkpoint or a run that replaces the weights."),
]
