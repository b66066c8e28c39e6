"""`polyturn report`: runs as a page in one file, or their metrics as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyturn.cli.arguments import declare, new_file
from polyturn.cli.console import Output
from polyturn.core.errors import ConfigError
from polyturn.store.run_folders import find_runs


@declare("report")
def main(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or a folder that contains runs.")],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", callback=new_file, help="The file to write: report.html, or curve.png with --metric."),
    ] = None,
    trajectories: Annotated[
        int | None, typer.Option("-n", min=0, help="Number of trajectories to show per run; 10 by default.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="Draw this metric as a picture (.png, .svg, .pdf) instead; * is any part; may be repeated."),
    ] = None,
) -> None:
    """Write a page about runs in one file, or plot their metrics."""
    if metric:
        if trajectories is not None:
            raise ConfigError(
                "-n sets the number of trajectories of a page, and --metric draws a picture without any; remove one of them"
            )
        from polyturn.tracking.plot import plot_metrics

        Output().fact("curve", plot_metrics(find_runs(runs), metric, out or Path("curve.png")))
        return
    if out is not None and out.suffix.lower() not in ("", ".html", ".htm"):
        raise ConfigError(f"--out is {out}, and a report is a page: give a .html file, or --metric to draw metrics")
    from polyturn.viewer.report import write_report

    num_trajectories = 10 if trajectories is None else trajectories
    Output().fact("report", write_report(find_runs(runs), out or Path("report.html"), num_trajectories=num_trajectories))
