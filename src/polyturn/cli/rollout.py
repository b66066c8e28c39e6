"""`polyturn rollout`: run some of the training tasks, record what happened, print it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polyturn.api.folders import open_place
from polyturn.api.rolling import roll_out
from polyturn.cli.console import Output, command
from polyturn.cli.show import trajectory_table


def run(path: Path, overrides: Sequence[str], *, checkpoint: Path | None, num_tasks: int) -> None:
    """Run `num_tasks` groups of `train.group_size` members and record them."""
    place, resolved = open_place(path, overrides)
    folder, groups = roll_out(place, resolved, num_tasks=num_tasks, checkpoint=checkpoint)
    out = Output()
    out.table(trajectory_table([t for g in groups for t in g.trajectories]))
    out.fact("look at one", command("show", folder, groups[0].trajectories[0].id))
