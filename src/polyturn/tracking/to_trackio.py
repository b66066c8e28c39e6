"""trackio: curves and a table of sample trajectories on this machine; `trackio show` opens them in the browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import trackio

from polyturn.tracking.base import RunInfo, RunTracker, Sample, literal


class TrackioTracker(RunTracker):
    """Logs to trackio's local database, in TRACKIO_DIR or its default folder."""

    def __init__(self, run: RunInfo, *, project: str = "polyturn", space_id: str | None = None) -> None:
        """Create the run in trackio, or continue it.

        Args:
            run: The run.
            project: The run's project.
            space_id: A Hugging Face Space to send the run to; None keeps it on this machine.
        """
        self._run = trackio.init(
            project=project,
            name=run.name,
            space_id=space_id,
            config=run.config(),
            resume="allow" if run.resumed_step is not None else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        self._run.log(dict(values), step=step)

    def log_samples(self, step: int, split: str, rows: Sequence[Sample]) -> None:
        """Show the trajectories as a table."""
        # Cells are rendered as Markdown, so text from environments is escaped.
        data = [[literal(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
        self._run.log({f"samples/{split}": trackio.Table(columns=list(Sample._fields), data=data)}, step=step)

    def close(self) -> None:
        """Write the remaining data."""
        self._run.finish()
