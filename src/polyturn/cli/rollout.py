"""`polyturn rollout`: run episodes of a few training tasks, and record them in a new run folder."""

from __future__ import annotations

from typing import Annotated

import typer

from polyturn.cli.arguments import CheckpointOption, ConfigArgument, Overrides, declare
from polyturn.cli.console import Output
from polyturn.cli.dialects import begin


@declare("rollout")
def main(
    config: ConfigArgument,
    overrides: Overrides = None,
    checkpoint: CheckpointOption = None,
    tasks: Annotated[
        int,
        typer.Option("-n", "--tasks", min=1, help="Number of training tasks; each has `train.group_size` episodes."),
    ] = 8,
) -> None:
    """Run episodes on the training tasks, and record them."""
    begin(config, overrides or [])
    from polyturn.api.folders import open_source
    from polyturn.api.rolling import roll_out
    from polyturn.cli.show import list_rows
    from polyturn.store.stored_run import open_store

    source, resolved = open_source(config, overrides or [])
    folder, _ = roll_out(source, resolved, num_tasks=tasks, checkpoint=checkpoint)
    rows = open_store(folder).table().to_pylist()
    list_rows(Output(), folder, rows, limit=len(rows))
