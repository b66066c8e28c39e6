"""`polyturn report` and `polyturn plot`: what became of runs, as a page and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polyturn.cli.console import Output
from polyturn.tracking.plot import plot_metrics
from polyturn.viewer.report import write_report


def report(runs: Sequence[Path], *, out: Path, num_trajectories: int) -> None:
    """Write one page about `runs`."""
    Output().fact("report", write_report(runs, out, num_trajectories=num_trajectories))


def plot(runs: Sequence[Path], *, metrics: Sequence[str], out: Path) -> None:
    """Draw metrics of `runs`."""
    Output().fact("curve", plot_metrics(runs, metrics, out))
