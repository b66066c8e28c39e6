"""TensorBoard: curves and a text table of sample trajectories, in event files under `<run>/tensorboard`.

It uses TensorBoard's own writer, so torch is not needed. View the files with `tensorboard --logdir runs`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from polyturn.tracking.base import RunInfo, RunTracker, Sample, literal


class TensorBoardTracker(RunTracker):
    """Writes event files."""

    def __init__(self, run: RunInfo, *, folder: str | None = None) -> None:
        """Open the writer.

        Args:
            run: The run.
            folder: Event files go to a subfolder of it with the run's name; by default to `<run>/tensorboard`.
        """
        self._writer = EventFileWriter(str(run.folder / "tensorboard" if folder is None else Path(folder) / run.name))
        if run.resumed_step is not None:  # hides the events of later steps, which the run repeats
            begun = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=run.resumed_step + 1, session_log=begun))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        points = [Summary.Value(tag=name, simple_value=v) for name, v in values.items() if math.isfinite(v)]
        self._add(step, Summary(value=points))

    def log_samples(self, step: int, split: str, rows: Sequence[Sample]) -> None:
        """Show the trajectories as a table."""
        lines = ["| id | reward | turns | stop | conversation |", "|---|---|---|---|---|"]
        for row in rows:
            reward = "-" if row.reward is None else f"{row.reward:.3g}"
            cells = (row.id, reward, str(row.turns), row.stop, row.conversation)
            lines.append("| " + " | ".join(literal(c) for c in cells) + " |")
        self._add(step, text_pb(f"samples/{split}", "\n".join(lines)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, summary: Summary) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
