"""The sections `dump`, `store` and `tracking`: what a run writes down besides checkpoints, and where it goes.

    store: {share: 0.1, max_gb: 20}
    tracking: [tensorboard, {name: wandb, project: agents}]

metrics.jsonl is always written, whatever stands here.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from polyturn.config.models.base import Section
from polyturn.config.parts import OwnPart


class DumpConfig(Section):
    """Trajectories as plain JSON lines, one file a step, beside the run's own records."""

    train: str | None = None
    """Folder for training, relative to the working directory."""
    evaluation: str | None = None
    """Folder for evaluation, relative to the working directory."""


class TrackerConfig(OwnPart):
    """A program that the numbers of a run are passed on to. Further keys are its own, for instance `project`."""

    PART: ClassVar[str] = "any tracker"

    name: str
    """tensorboard, wandb, mlflow, trackio, otel, a registered name or `file.py:Class`."""
    samples: int = Field(4, ge=0)
    """Trajectories of each step in its table of samples."""
