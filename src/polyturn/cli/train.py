"""`polyturn train`: from a config to a trained model, with a before/after table and where everything was left."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from polyturn import build
from polyturn.cli.runs import new_run_folder, open_place
from polyturn.config.load import write_resolved
from polyturn.core.errors import CheckpointError
from polyturn.evaluation.report import EvalReport
from polyturn.tracking.plot import plot_learning_curve
from polyturn.training.observer import RunObserver
from polyturn.training.sft import SftSettings, run_sft

logger = logging.getLogger(__name__)
T = TypeVar("T")

ROWS = {
    "success": "success",
    "first_turn_success": "first-turn success",
    "mean_turns": "mean turns",
    "valid_tool_calls": "valid tool calls",
    "repaired": "repaired after feedback",
}


def run(path: Path, overrides: Sequence[str], *, resume: bool, dry_run: bool) -> None:
    """Train the run that `path` describes."""
    began = time.monotonic()
    console = Console(highlight=False)
    place, resolved = open_place(path, overrides)
    config = place.config
    folder = Path(config.out) / config.name
    if resume and not (folder / "checkpoints").is_dir():
        raise CheckpointError(
            f"there is no checkpoint under {folder / 'checkpoints'} to resume from; train without --resume"
        )
    parts = build.build_parts(place)
    if dry_run:
        from polyturn.cli.dry_run import show

        show(parts, resolved, console)
        return
    if not resume:
        folder = new_run_folder(folder)
    write_resolved(resolved, folder / "config.yaml")
    console.print(f"run folder  {folder}")
    with RunObserver(folder, total_steps=config.train.steps) as observer:
        if not resume:
            warm_start(parts, observer)
        trainer = build.build_trainer(parts, folder=folder, observer=observer)
        if resume:
            latest = trainer.checkpoints.latest()
            if latest is None:
                raise CheckpointError(f"there is no whole checkpoint under {folder / 'checkpoints'}")
            trainer.resume(latest)
            observer.resume(trainer.state.step)
        try:
            state = asyncio.run(_until_done(trainer.run()))
        except (KeyboardInterrupt, asyncio.CancelledError):
            console.print(f"\ninterrupted at step {trainer.state.step}; go on with: polyturn train {path} --resume")
            raise KeyboardInterrupt from None
    if state.reports.get("before") and state.reports.get("after"):
        console.print(report_table(state.reports["before"], state.reports["after"]))
    curve = plot_learning_curve(folder / "metrics.jsonl", folder / "curve.png", title=config.name)
    console.print(f"steps          {state.step} in {time.monotonic() - began:.0f} s")
    console.print(f"curve          {curve}")
    console.print(f"checkpoint     {trainer.checkpoints.latest()}")
    console.print(f"trajectories   {folder / 'trajectories'}")
    console.print(f"look at them   polyturn show {folder}")


def warm_start(parts: build.Parts, observer: RunObserver) -> int:
    """Train on the conversations of `warm_start`, if any, and return the number of steps taken."""
    sft = parts.place.config.warm_start
    if sft.steps == 0:
        return 0
    samples = build.warm_start_samples(parts)
    policy = build.build_policy(parts, sft.optim, steps=sft.steps, max_tokens_per_batch=sft.max_tokens_per_batch)
    settings = SftSettings(
        steps=sft.steps, batch_size=sft.batch_size, seed=parts.place.config.seed, max_seconds=sft.max_seconds
    )
    return run_sft(policy, samples, settings, on_step=lambda step, m: observer.on_sft(step, sft.steps, m))


def report_table(before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the before/after table, two columns for each evaluation set."""
    assert set(ROWS) <= {f.name for f in fields(EvalReport)}
    table = Table(title="before and after", title_justify="left")
    table.add_column("")
    for name in after:
        table.add_column(f"{name}\nbefore", justify="right")
        table.add_column(f"{name}\nafter", justify="right")
    for key, label in ROWS.items():
        cells = [_cell(key, side.get(name, {}).get(key, math.nan)) for name in after for side in (before, after)]
        table.add_row(label, *cells)
    return table


def _cell(key: str, value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.2f}" if key == "mean_turns" else f"{100 * value:.1f} %"


async def _until_done(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; SIGINT and SIGTERM cancel it, so that it leaves a checkpoint behind."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    return await task
