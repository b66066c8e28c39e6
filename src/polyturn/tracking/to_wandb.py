"""Weights & Biases: curves, the config, and a table of sample trajectories.

    tracking: [{name: wandb, project: arithmetic}]        mode: offline keeps the run on this machine

The x axis is the run's own `step`, so the points of a resumed run, and of an evaluation logged after its step, have the
right position.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from polyturn.tracking.base import RunInfo, RunTracker, Sample


class WandbTracker(RunTracker):
    """Logs to a run of Weights & Biases."""

    def __init__(
        self,
        run: RunInfo,
        *,
        project: str = "polyturn",
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: str | None = None,
    ) -> None:
        """Create the run in Weights & Biases, or continue it.

        Args:
            run: The run.
            project: The run's project.
            entity: User or team; None uses the account's default.
            group: Runs of the same group are shown together.
            tags: Tags of the run.
            mode: online, offline or disabled; WANDB_MODE by default.
        """
        self._run = wandb.init(
            project=project,
            entity=entity,
            group=group,
            tags=list(tags),
            mode=mode,  # type: ignore[arg-type]
            name=run.name,
            id=run.kept("wandb_id") or run.keep("wandb_id", secrets.token_hex(4)),
            resume="allow",
            dir=str(run.folder),
            config=run.config(),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        self._run.log({"step": step, **values})

    def log_samples(self, step: int, split: str, rows: Sequence[Sample]) -> None:
        """Show the trajectories as a table."""
        data: list[list[Any]] = [list(row) for row in rows]
        self._run.log({"step": step, f"samples/{split}": wandb.Table(columns=list(Sample._fields), data=data)})

    def close(self) -> None:
        """Send the remaining data."""
        self._run.finish()
