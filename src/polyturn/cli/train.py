"""`polyturn train`: train a model from a config, and print a before/after table and the paths of outputs."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from polyturn.api.console import tell_start
from polyturn.cli.arguments import Command, ConfigArgument, Overrides, declare, refuse_unused
from polyturn.cli.console import Output, command, program
from polyturn.cli.dialects import described, flags_of, load_native, spelled_out, train_in_dialect
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
    """The command `train`, with a flag for each installed dialect."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Convert `--NAME` of a dialect to `--dialect NAME`.

        Raises:
            ConfigError: `--resume` is the only argument.
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
    context: typer.Context,
    config: ConfigArgument,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option(help="Resume from the run's latest checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check everything and show the first task and estimates.")
    ] = False,
    ids: Annotated[bool, typer.Option("--ids", help="With --dry-run: also show the token ids of the first prompt.")] = False,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, max=100_000, help="With --dry-run: only estimate memory, for this many GPUs of any machine."),
    ] = None,
    gpu_memory: Annotated[float, typer.Option(min=0.1, max=100_000, help="With --gpus: GB of memory per GPU.")] = 80.0,
    link: Annotated[float, typer.Option(min=0.01, max=100_000, help="With --gpus: GB/s from the ranks to a server.")] = 50.0,
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
        raise ConfigError("--ids works only with --dry-run of a native config; remove it, or add --dry-run")
    options = {str(parameter.name) for parameter in context.command.params}
    if gpus is None:
        refuse_unused(context, options - {"gpu_memory", "link"}, here="without --gpus")
    else:
        refuse_unused(context, options - {"resume", "ids", "dialect"}, here="with --gpus")
        if not dry_run:
            raise ConfigError("--gpus works only with --dry-run; remove it, or add --dry-run")
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(f'--{n}' for n in names)} are two dialects; give only the config's dialect")
    if (nproc is not None or ray is not None) and names:
        raise ConfigError("--nproc and --ray are for native configs; migrate this one first (polyturn config migrate)")
    if names:
        train_in_dialect(names[0], config, changes, resume=resume, dry_run=dry_run)
        return
    if resume:
        _check_resumed(config, changes)
    # Before slow imports, and without the keys of --nproc and --ray, which another library's config does not have.
    loaded = load_native(config, changes, warns=False, flags=flags_of(resume=resume, dry_run=dry_run))
    changes += [] if nproc is None else [f"train.distributed.ranks={nproc}"]
    changes += [] if ray is None else [f"cluster.address={ray}"]
    if gpus is not None:
        return show_plan(config, changes, gpus=gpus, gpu_memory=gpu_memory, link=link)
    tell_start(loaded.config.name)
    run(config, changes, resume=resume, dry_run=dry_run, with_ids=ids)


def show_plan(path: Path, overrides: Sequence[str], *, gpus: int, gpu_memory: float, link: float) -> None:
    """Print the memory of each process on GPUs that this machine need not have; reads no data and no weights.

    Raises:
        ConfigError: the layout does not fit; the message has the nearest layout that does.
    """
    from polyturn.api.folders import open_source
    from polyturn.build.memory_plan import Gpus, columns, counted, demand_of, layout_of, require_fit

    source, _ = open_source(path, overrides)
    demand, layout, each = demand_of(source), layout_of(source.config), Gpus(gpu_memory, link)
    Output().text(columns(each.estimates(source.config, demand, layout)))
    require_fit(demand, layout, gpus=gpus, limit=each.limit)
    Output().text(f"fits on {layout.gpus} of the {counted(gpus, 'GPU')} of {gpu_memory:g} GB (--gpus and --gpu-memory)")


def _check_resumed(config: Path, overrides: Sequence[str]) -> None:
    """Raise for `--resume` with a run that does not exist, or followed by a run's folder."""
    for override in overrides:
        if "=" not in override and not override.endswith((".yaml", ".yml")):
            raise ConfigError(
                f"--resume has no value, and {override!r} is not KEY=VALUE; to resume the run of a folder, give the "
                f"folder in place of the config: {command('train', override, '--resume')}"
            )
    if not config.exists():
        raise ConfigError(
            f"--resume: there is neither a run nor a config at {str(config)!r}; `{command('show', 'runs')}` lists runs"
        )


def run(path: Path, overrides: Sequence[str], *, resume: bool, dry_run: bool, with_ids: bool = False) -> None:
    """Train the run of the configuration `path`."""
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
    """Train a run, and print the result.

    Args:
        source: The configuration.
        resolved: The configuration as plain data, for `write_resolved`.
        again: Called with a run's name; returns the command that resumes this run.
        resume: Whether to resume from the latest checkpoint of the run's folder; "auto": if there is one.
        dry_run: Only check everything and print the report.
        with_ids: In a dry run, also print the token ids of the first prompt.
    """
    from polyturn.api.training import RunOptions, run_training

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
    if finished is not None:
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
    parts = f"{_seconds(run.generating_s)} generating, {_seconds(run.training_s)} training, {_seconds(rest)} everything else"
    out.fact("time", f"{_seconds(run.wall_s)}: {parts}")
    out.fact("curve", run.curve)
    out.fact("checkpoint", run.latest)
    if run.best is not None:
        out.fact("best", f"{run.best} (success {state.best:.3f})")
    out.fact("trajectories", run.folder / "trajectories")
    out.fact("look at them", command("show", run.folder))
    out.fact("in the browser", command("view", run.folder))


def _seconds(seconds: float) -> str:
    """Return seconds as text: "96 s", "0.31 s"; few seconds get decimals, so that training of a small model is not 0 s."""
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2f} s"


Reports = Mapping[str, Mapping[str, float]]


def report_table(before: Reports, after: Reports, *, untouched: Reports | None = None) -> Table:
    """Return the before/after table. Three sets fit a narrow terminal; metrics without a value have no row.

    `untouched` has the results before a warm start, if they were evaluated.
    """
    stages = [before, after] if untouched is None else [untouched, before, after]
    table = Table(title="before and after", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("before → after" if untouched is None else "untouched → warmed up → after", no_wrap=True)
    for name in after:
        table.add_column(name, justify="right", no_wrap=True)
    for key, label in ROWS.items():
        if all(math.isnan(one.get(key, math.nan)) for stage in stages for one in stage.values()):
            continue  # undefined, such as the share of valid calls without tools
        table.add_row(label, *(_cell(key, [stage.get(name, {}) for stage in stages]) for name in after))
    return table


def _cell(key: str, stages: Sequence[Mapping[str, float]]) -> str:
    def show(value: float) -> str:
        if math.isnan(value):
            return "-"
        return f"{value:.2f}" if key == "mean_turns" else f"{100 * value:.1f}"

    unit = "" if key == "mean_turns" else " %"
    return " → ".join(show(stage.get(key, math.nan)) for stage in stages) + unit
