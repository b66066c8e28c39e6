"""Commands about runs that were recorded: list, show, compare, score again, draw.

    polyturn show RUN     polyturn compare A B     polyturn view RUN     polyturn report RUN     polyturn rescore RUN

None of them needs the model that made the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyturn.cli.arguments import AllowHosts, HostOption, PageTokenFile, PortOption, RateLimitOption, RunFolder, new_file
from polyturn.core.errors import ConfigError


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Folder of the run that is the baseline.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Folder of the run that is compared with it.")],
    split: Annotated[str | None, typer.Option(help="Which evaluation, for instance eval/greedy.")] = None,
    success_at: Annotated[float, typer.Option(help="The outcome that counts as success.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Compare two evaluations of the same tasks by a paired test. What is significant is said."""
    from polyturn.cli import compare as command

    command.run(a, b, split=split, success_at=success_at, as_json=as_json)


def show(
    run: Annotated[
        Path, typer.Argument(metavar="[RUN|FOLDER]", help="Folder of a run, or a folder of runs, which are listed.")
    ] = Path("runs"),
    trajectory: Annotated[str | None, typer.Argument(help="Id of a trajectory, as the list shows it.")] = None,
    named: Annotated[str | None, typer.Option("--trajectory", help="The same as the second argument.")] = None,
    split: Annotated[str | None, typer.Option(help="Only this split: train, or eval/NAME.")] = None,
    where: Annotated[str | None, typer.Option(help="Only these, an SQL condition: reward < 1 and num_turns > 2.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show the one trajectory token by token, with its mask.")] = False,
    limit: Annotated[int, typer.Option("-n", min=1, help="How many trajectories to list.")] = 20,
) -> None:
    """List the runs of a folder, or a run's trajectories, or show one."""
    from polyturn.cli import show as command

    chosen = named or trajectory
    if tokens and chosen is None:
        raise ConfigError("--tokens shows one trajectory; name it, as `polyturn show RUN` lists them")
    is_narrowed = chosen is not None or split is not None or where is not None
    command.run(run, trajectory=chosen, split=split, limit=limit, where=where, tokens=tokens, lists_runs=not is_narrowed)


def rescore(
    run: RunFolder,
    reward: Annotated[str, typer.Option(help="The reward function: file.py:function, module:function or a known name.")],
    where: Annotated[str | None, typer.Option(help="Only these, an SQL condition: split = 'train' and step > 10.")] = None,
    out: Annotated[Path | None, typer.Option(help="The Parquet file; rescored/NAME.parquet of the run by default.")] = None,
) -> None:
    """Score a run's trajectories again, with another reward."""
    from polyturn.cli import rescore as command

    command.run(run, reward=reward, where=where, out=out)


def view(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Folders of runs, or a folder that holds runs.")
    ] = None,
    desk: Annotated[Path | None, typer.Option(help="Answer the conversations that wait in this folder.")] = None,
    terminal: Annotated[bool, typer.Option("--terminal", help="With --desk: answer here instead of on a page.")] = False,
    host: HostOption = "127.0.0.1",
    port: PortOption = None,
    token_file: PageTokenFile = None,
    rate_limit: RateLimitOption = None,
    allow_host: AllowHosts = None,
) -> None:
    """Look at runs in the browser, while they train and after. Curves, conversations, every token; answer as their user."""
    if not runs and desk is None:
        raise ConfigError("name the folder of a run, or --desk FOLDER to answer its conversations")
    if terminal:
        if desk is None or runs:
            raise ConfigError("--terminal answers the conversations of --desk FOLDER alone; leave the runs out")
        from polyturn.cli.answer import run_terminal

        run_terminal(desk)
        return
    from polyturn.cli import view as command
    from polyturn.cli.serve import ServeOptions

    options = ServeOptions(
        host=host,
        port=port,
        first_port=7860 if runs else 7870,
        token_file=token_file,
        rate_limit=rate_limit,
        allowed_hosts=tuple(allow_host or ()),
    )
    command.run(runs or [], options, desk=desk)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs; two are shown side by side.")],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", callback=new_file, help="The file to write: report.html, or curve.png with --metric."),
    ] = None,
    trajectories: Annotated[
        int | None, typer.Option("-n", min=0, help="How many trajectories of each run are shown; 10 by default.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="Draw this metric as a picture (.png, .svg, .pdf) instead; * is any part; may be repeated."),
    ] = None,
) -> None:
    """Write a page about runs in one file, or plot their metrics."""
    from polyturn.cli.console import Output

    if metric:
        if trajectories is not None:
            raise ConfigError("-n counts trajectories of a page, and --metric draws a picture, which has none; drop one")
        from polyturn.tracking.plot import plot_metrics

        Output().fact("curve", plot_metrics(runs, metric, out or Path("curve.png")))
        return
    if out is not None and out.suffix.lower() not in ("", ".html", ".htm"):
        raise ConfigError(f"--out is {out}, and a report is a page: name a .html file, or the metrics to draw with --metric")
    from polyturn.viewer.report import write_report

    num_trajectories = 10 if trajectories is None else trajectories
    Output().fact("report", write_report(runs, out or Path("report.html"), num_trajectories=num_trajectories))
