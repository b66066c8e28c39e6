"""Commands about runs that were recorded: list, show, compare, score again, draw.

    polyturn runs     polyturn show RUN     polyturn compare A B     polyturn view RUN     polyturn report RUN

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
    run: RunFolder,
    trajectory: Annotated[str | None, typer.Argument(help="Id of a trajectory, as the list shows it.")] = None,
    named: Annotated[str | None, typer.Option("--trajectory", help="The same as the second argument.")] = None,
    split: Annotated[str | None, typer.Option(help="Only this split: train, or eval/NAME.")] = None,
    where: Annotated[str | None, typer.Option(help="Only these, an SQL condition: reward < 1 and num_turns > 2.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show the one trajectory token by token, with its mask.")] = False,
    limit: Annotated[int, typer.Option("-n", min=1, help="How many trajectories to list.")] = 20,
) -> None:
    """List a run's trajectories, or show one, down to its tokens."""
    from polyturn.cli import show as command

    chosen = named or trajectory
    if tokens and chosen is None:
        raise ConfigError("--tokens shows one trajectory; name it, as `polyturn show RUN` lists them")
    command.run(run, trajectory=chosen, split=split, limit=limit, where=where, tokens=tokens)


def list_runs(folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Folder of runs.")] = Path("runs")) -> None:
    """List the runs of a folder."""
    from polyturn.cli import list_runs as command

    command.run(folder)


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
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or a folder that holds runs.")],
    desk: Annotated[Path | None, typer.Option(help="Also answer the conversations that wait in this folder.")] = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = None,
    token_file: PageTokenFile = None,
    rate_limit: RateLimitOption = None,
    allow_host: AllowHosts = None,
) -> None:
    """Look at runs in the browser, while they train and after. Curves, conversations, every token."""
    from polyturn.cli import view as command
    from polyturn.cli.serve import ServeOptions

    options = ServeOptions(
        host=host,
        port=port,
        first_port=7860,
        token_file=token_file,
        rate_limit=rate_limit,
        allowed_hosts=tuple(allow_host or ()),
    )
    command.run(runs, options, desk=desk)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs; two are shown side by side.")],
    out: Annotated[Path, typer.Option("-o", "--out", callback=new_file, help="The page to write.")] = Path("report.html"),
    trajectories: Annotated[int, typer.Option("-n", min=0, help="How many trajectories of each run are shown.")] = 10,
) -> None:
    """Write one self-contained page about runs. Curves, tables, highlights token by token."""
    from polyturn.cli.console import Output
    from polyturn.viewer.report import write_report

    Output().fact("report", write_report(runs, out, num_trajectories=trajectories))


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs; each is a curve.")],
    metric: Annotated[
        list[str] | None, typer.Option(help="A metric, * stands for any part; may be given several times.")
    ] = None,
    out: Annotated[
        Path, typer.Option("-o", "--out", callback=new_file, help="The picture to write: .png, .svg or .pdf.")
    ] = Path("curve.png"),
) -> None:
    """Draw metrics of runs over the steps."""
    from polyturn.cli.console import Output
    from polyturn.tracking.plot import plot_metrics

    Output().fact("curve", plot_metrics(runs, metric or [], out))
