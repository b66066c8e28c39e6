"""`polyturn train`: from a config to a trained model, with a before/after table and where everything was left."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table

from polyturn import build
from polyturn.api.folders import open_source
from polyturn.api.training import RunOptions, TrainedRun, run_training
from polyturn.cli.console import Output, command, program
from polyturn.cli.dialogues import dialogues
from polyturn.evaluation.report import EvalReport

ROWS = {
    "success": "success",
    "first_turn_success": "first-turn success",
    "mean_turns": "mean turns",
    "valid_tool_calls": "valid tool calls",
    "repaired": "repaired after feedback",
}


def run(path: Path, overrides: Sequence[str], *, resume: bool, dry_run: bool, with_ids: bool = False) -> None:
    """Train the run that `path` describes."""
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
    assert set(ROWS) <= {f.name for f in fields(EvalReport)}
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
