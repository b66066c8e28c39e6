"""`polyturn train`: from a config to a trained model, with a before/after table and where everything was left."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from polyturn.cli.arguments import Command, ConfigArgument, Overrides, declare
from polyturn.cli.console import Output, command, program
from polyturn.cli.dialects import begin, described, spelled_out, train_in_dialect
from polyturn.core.errors import ConfigError

if TYPE_CHECKING:
    from polyturn import build
    from polyturn.api.training import TrainedRun

ROWS = {
    "success": "success",
    "first_turn_success": "first-turn success",
    "mean_turns": "mean turns",
    "valid_tool_calls": "valid tool calls",
    "repaired": "repaired after feedback",
}


class TrainCommand(Command):
    """The command `train`, which has a flag for each dialect that is installed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `--NAME` of a dialect as `--dialect NAME`.

        Raises:
            ConfigError: `--resume` stands alone.
        """
        if "--resume" in args and all(arg.startswith("-") for arg in args):
            example = command("train", "runs/NAME", "--resume")
            raise ConfigError(f"--resume needs the folder of a run, or its config: {example}")
        return super().parse_args(ctx, list(spelled_out(args)))

    def get_help(self, ctx: Any) -> Any:
        """Return the help text with the flags of the installed dialects."""
        for option in self.params:
            if option.name == "dialect":
                option.help = f"CONFIG and the overrides are written in the keys of another library: {described()}."  # type: ignore[attr-defined]
        return super().get_help(ctx)


@declare("train", cls=TrainCommand)
def main(
    config: ConfigArgument,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option(help="Go on from the run's latest checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show the first task and estimates; stop.")
    ] = False,
    ids: Annotated[
        bool, typer.Option("--ids", help="With --dry-run: show the ids of the first prompt's tokens too.")
    ] = False,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Train on this many processes of this machine (train.distributed.ranks).")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Train on a Ray cluster: its address, auto, or local.")
    ] = None,
    dialect: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="CONFIG and the overrides are written in the keys of another library."),
    ] = None,
) -> None:
    """Train: warm start if configured, evaluation, RL, evaluation."""
    names, changes = sorted(set(dialect or ())), overrides or []
    if ids and (names or not dry_run):
        raise ConfigError("--ids belongs to --dry-run of a native config; leave it out, or add --dry-run")
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(f'--{n}' for n in names)} are two dialects; a config is written in one of them")
    if (nproc is not None or ray is not None) and names:
        raise ConfigError("--nproc and --ray are for native configs; migrate this one first (polyturn config migrate)")
    if names:
        train_in_dialect(names[0], config, changes, resume=resume, dry_run=dry_run)
        return
    if resume:
        _check_resumed(config, changes)
    changes += [] if nproc is None else [f"train.distributed.ranks={nproc}"]
    changes += [] if ray is None else [f"cluster.address={ray}"]
    begin(config, changes)
    run(config, changes, resume=resume, dry_run=dry_run, with_ids=ids)


def _check_resumed(config: Path, overrides: Sequence[str]) -> None:
    """Refuse `--resume` with a run that is not there, or with a run's folder behind it."""
    for override in overrides:
        if "=" not in override and not override.endswith((".yaml", ".yml")):
            raise ConfigError(
                f"--resume takes no value, and {override!r} is not KEY=VALUE; to go on with the run of a folder, name it in "
                f"place of the config: {command('train', override, '--resume')}"
            )
    if not config.exists():
        raise ConfigError(
            f"--resume: there is neither a run nor a config at {str(config)!r}; `{command('show', 'runs')}` lists runs"
        )


def run(path: Path, overrides: Sequence[str], *, resume: bool, dry_run: bool, with_ids: bool = False) -> None:
    """Train the run that `path` describes."""
    from polyturn.api.folders import open_source

    source, resolved = open_source(path, overrides, resume=resume)

    def again(name: str) -> list[str]:
        renamed = [] if name == source.config.name else [f"name={name}"]
        return [*program(), "train", str(path), *overrides, *renamed, "--resume"]

    train(source, resolved, again=again, resume=resume, dry_run=dry_run, with_ids=with_ids)


def train(
    source: build.ConfigSource,
    resolved: Mapping[str, Any],
    *,
    again: Callable[[str], Sequence[str]],
    resume: bool | Literal["auto"],
    dry_run: bool,
    with_ids: bool = False,
) -> None:
    """Train a run, and say what it came to.

    Args:
        source: Its configuration.
        resolved: The same as plain data that is safe to write.
        again: Returns the command that goes on with the run of a name.
        resume: Whether it goes on from the latest checkpoint of its folder; "auto" where there is one.
        dry_run: Check everything, show it, and stop.
        with_ids: Of a dry run: also show the ids of the first prompt's tokens.
    """
    from polyturn.api.training import RunOptions, TrainedRun, run_training

    out = Output()

    def show(parts: build.Parts, tasks: build.RunTasks) -> None:
        from polyturn.api.dry_run import report_of

        report = report_of(parts, tasks, resolved)
        out.text(report.text(with_ids=with_ids))
        report.require_start()

    options = RunOptions(
        again=lambda name: shlex.join(again(name)),
        resume=resume,
        dry_run=show if dry_run else None,
        on_folder=lambda folder: out.fact("run folder", folder),
    )
    finished = run_training(source, resolved, options)
    if isinstance(finished, TrainedRun):
        _tell(finished, out)


def _tell(run: TrainedRun, out: Output) -> None:
    from polyturn.cli.dialogues import dialogues

    state = run.state
    if state.reports.get("before") and state.reports.get("after"):
        out.table(report_table(state.reports["before"], state.reports["after"], untouched=state.reports.get("untouched")))
        for table in dialogues(run.folder, f"eval/{next(iter(state.reports['after']))}"):
            out.table(table)
    rest = max(0.0, run.wall_s - run.generating_s - run.training_s)
    out.fact("steps", state.step)
    out.fact(
        "time",
        f"{run.wall_s:.0f} s: {run.generating_s:.0f} s generating, {run.training_s:.0f} s training, {rest:.0f} s "
        "everything else",
    )
    out.fact("curve", run.curve)
    out.fact("checkpoint", run.latest)
    if run.best is not None:
        out.fact("best", f"{run.best} (success {state.best:.3f})")
    out.fact("trajectories", run.folder / "trajectories")
    out.fact("look at them", command("show", run.folder))
    out.fact("in the browser", command("view", run.folder))


Reports = Mapping[str, Mapping[str, float]]


def report_table(before: Reports, after: Reports, *, untouched: Reports | None = None) -> Table:
    """Return the before/after table; three sets fit a narrow terminal, and what nothing was measured on has no row.

    `untouched` is what the model did before a warm start, where that was evaluated.
    """
    stages = [before, after] if untouched is None else [untouched, before, after]
    table = Table(title="before and after", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("before → after" if untouched is None else "untouched → warmed up → after", no_wrap=True)
    for name in after:
        table.add_column(name, justify="right", no_wrap=True)
    for key, label in ROWS.items():
        if all(math.isnan(one.get(key, math.nan)) for stage in stages for one in stage.values()):
            continue  # nothing that it could be measured on, such as calls where there are no tools
        table.add_row(label, *(_cell(key, [stage.get(name, {}) for stage in stages]) for name in after))
    return table


def _cell(key: str, stages: Sequence[Mapping[str, float]]) -> str:
    def show(value: float) -> str:
        if math.isnan(value):
            return "-"
        return f"{value:.2f}" if key == "mean_turns" else f"{100 * value:.1f}"

    unit = "" if key == "mean_turns" else " %"
    return " → ".join(show(stage.get(key, math.nan)) for stage in stages) + unit
