"""`polyturn train`: from a config to a trained model, with a before/after table and where everything was left."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import math
import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from rich.box import SIMPLE_HEAD
from rich.table import Table

from polyturn import build
from polyturn.cli import ranks
from polyturn.cli.console import Output, command, logging_to, program, stderr_console
from polyturn.cli.runs import check_writable, keep_tokenizer, new_run_folder, open_place
from polyturn.cli.signals import Signals
from polyturn.config.load import write_resolved
from polyturn.core.errors import CheckpointError, EngineLostError, PolyturnError, RankLostError
from polyturn.core.run_loop import run_loop
from polyturn.core.secret import masked
from polyturn.evaluation.report import EvalReport
from polyturn.tracking.plot import plot_learning_curve
from polyturn.training.checkpoint import Checkpoints
from polyturn.training.distributed import DistributedPolicy
from polyturn.training.loop import Trainer
from polyturn.training.observer import RunObserver
from polyturn.training.resume import changed_settings
from polyturn.training.sft import SftSettings, run_sft
from polyturn.training.state import LoopState

logger = logging.getLogger(__name__)

ROWS = {
    "success": "success",
    "first_turn_success": "first-turn success",
    "mean_turns": "mean turns",
    "valid_tool_calls": "valid tool calls",
    "repaired": "repaired after feedback",
}


def run(path: Path, overrides: Sequence[str], *, resume: bool, dry_run: bool, with_ids: bool = False) -> None:
    """Train the run that `path` describes."""
    place, resolved = open_place(path, overrides)

    def again(name: str) -> list[str]:
        renamed = [] if name == place.config.name else [f"name={name}"]
        return [*program(), "train", str(path), *overrides, *renamed, "--resume"]

    train(place, resolved, again=again, resume=resume, dry_run=dry_run, with_ids=with_ids)


def train(
    place: build.ConfigSource,
    resolved: Mapping[str, Any],
    *,
    again: Callable[[str], Sequence[str]],
    resume: bool | Literal["auto"],
    dry_run: bool,
    with_ids: bool = False,
) -> None:
    """Train a run.

    Args:
        place: Its configuration.
        resolved: The same as plain data that is safe to write.
        again: Returns the command that goes on with the run of a name.
        resume: Whether it goes on from the latest checkpoint of its folder; "auto" where there is one.
        dry_run: Check everything, show it, and stop.
        with_ids: Of a dry run: also show the ids of the first prompt's tokens.
    """
    config = place.config
    this = ranks.this_rank() or ranks.RankPlace(0, 1, 0)
    build.check_ranks(config, max(this.size, config.train.distributed.ranks))
    if this.rank > 0:
        build.follow_leader(place, num_ranks=this.size, local_rank=this.local, on_joined=ranks.keep_serving)
        return
    ranks.end_with_launcher()
    is_on_cluster = config.cluster.address is not None and not dry_run
    if this.size == 1 and config.train.distributed.ranks > 1 and not dry_run and not is_on_cluster:
        ranks.launch(config.train.distributed.ranks)
        return
    attempt = _Attempt(place=place, resume=resume)
    for left in range(config.cluster.restarts if is_on_cluster else 0, -1, -1):
        try:
            _train(attempt, resolved, this, again=again, dry_run=dry_run, with_ids=with_ids)
        except (RankLostError, EngineLostError) as problem:
            if not left:
                raise
            logger.warning(
                "%s\nThe run goes on from its latest checkpoint; restarts left after this one: %d", problem, left - 1
            )
            named = config.model_copy(update={"name": attempt.name})
            attempt = _Attempt(place=replace(place, config=named), resume="auto")
        else:
            return


@dataclass(slots=True)
class _Attempt:
    """One try to train a run to its end."""

    place: build.ConfigSource
    resume: bool | Literal["auto"]
    name: str = ""
    """The run's folder, once it is chosen."""


def _train(
    attempt: _Attempt,
    resolved: Mapping[str, Any],
    this: ranks.RankPlace,
    *,
    again: Callable[[str], Sequence[str]],
    dry_run: bool,
    with_ids: bool = False,
) -> None:
    began = time.monotonic()
    out = Output()
    place, resume = attempt.place, attempt.resume
    config = place.config
    folder = Path(config.out) / config.name
    latest = Checkpoints(folder / "checkpoints").latest() if resume else None
    if resume == "auto":
        resume = latest is not None or warm_checkpoints(folder).latest() is not None
    if resume and latest is None and warm_checkpoints(folder).latest() is None:
        raise CheckpointError(
            f"there is no checkpoint under {folder / 'checkpoints'} to resume from; train without --resume, or name another "
            "run with name=…"
        )
    check_writable(folder)
    tasks = build.build_run_tasks(place)
    is_on_cluster = config.cluster.address is not None and not dry_run
    if is_on_cluster:
        parts = build.cluster_parts(place)
    else:
        parts = build.build_parts(place, check=functools.partial(build.check_before_weights, place, tasks))
    parts, tasks = build.settle(parts, tasks)
    place, config = parts.place, parts.place.config
    build.check_training(parts, tasks)
    if dry_run:
        from polyturn.cli.dry_run import show

        show(parts, tasks, resolved, out, with_ids=with_ids)
        return
    if this.size > 1:
        parts = build.lead(parts, num_ranks=this.size, local_rank=this.local)
    if not resume:
        folder = new_run_folder(folder)
    attempt.name = folder.name
    if resume:
        tell_changes(folder / "config.yaml", resolved)
    write_resolved(resolved, folder / "config.yaml")
    keep_tokenizer(parts, folder)
    out.fact("run folder", folder)
    line = shlex.join(again(folder.name))
    also = build.build_records(parts, tasks.eval_sets, environ=os.environ)
    team = contextlib.nullcontext() if parts.team is None else contextlib.closing(parts.team)
    with (
        team,
        logging_to(folder / "log.txt"),
        RunObserver(folder, total_steps=config.train.steps, console=stderr_console(), also=also) as observer,
    ):
        warm = Spent()
        if latest is None:
            warm = warm_start(parts, observer, folder=folder, again=line)
        trainer = build.build_trainer(parts, tasks, folder=folder, observer=observer)
        if latest is not None:
            loading = time.monotonic()
            trainer.resume(latest)
            observer.resume(trainer.state.step)
            logger.info("resumed in %.2f s beside loading the model", time.monotonic() - loading)
            if trainer.state.step >= config.train.steps:
                logger.warning(
                    "the run is complete: it has taken %d steps, and train.steps is %d; give more of them to train on",
                    trainer.state.step,
                    config.train.steps,
                )
        # What was imported and built lives as long as the run; the collector need not walk it again (0.3 s each time).
        gc.collect()
        gc.freeze()
        with Signals() as signals:
            state = run_loop(_until_done(trainer, parts, signals, again=line))
    if state.reports.get("before") and state.reports.get("after"):
        out.table(report_table(state.reports["before"], state.reports["after"]))
    try:
        curve: object = plot_learning_curve(folder / "metrics.jsonl", folder / "curve.png", title=config.name)
    except PolyturnError as problem:
        curve = f"none: {problem}"
    wall, trained = time.monotonic() - began, warm.train_s + trainer.policy.train_seconds
    rest = max(0.0, wall - parts.busy_s - trained)
    out.fact("steps", state.step)
    out.fact(
        "time", f"{wall:.0f} s: {parts.busy_s:.0f} s generating, {trained:.0f} s training, {rest:.0f} s everything else"
    )
    out.fact("curve", curve)
    out.fact("checkpoint", trainer.checkpoints.latest())
    if state.best > 0 and (best := trainer.checkpoints.best()) not in (None, trainer.checkpoints.latest()):
        out.fact("best", f"{best} (success {state.best:.3f})")
    out.fact("trajectories", folder / "trajectories")
    out.fact("look at them", command("show", folder))
    out.fact("in the browser", command("view", folder))


def tell_changes(path: Path, resolved: Mapping[str, Any]) -> None:
    """Say which settings a resumed run has that differ from those before, which `path` holds."""
    try:
        former = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as problem:
        logger.warning("what this run was started with is not known (%s)", problem)
        return
    for line in changed_settings(former if isinstance(former, dict) else {}, masked(resolved)):
        logger.warning("resumed with another setting: %s", line)


class Spent(NamedTuple):
    """What a warm start took."""

    steps: int = 0
    train_s: float = 0.0
    """Seconds in forward and backward."""


def warm_checkpoints(folder: Path) -> Checkpoints:
    """Return where a warm start that is interrupted leaves its checkpoint; it is gone once the warm start is complete."""
    return Checkpoints(folder / "warm_start", keep=1)


def warm_start(parts: build.Parts, observer: RunObserver, *, folder: Path, again: str) -> Spent:
    """Train on the conversations of `warm_start`, if any; go on where an interrupted run left off.

    SIGINT and SIGTERM end it after the step under way with a checkpoint, and the process with 128 + their number.
    """
    sft = parts.place.config.warm_start
    if sft.steps == 0:
        return Spent()
    samples = build.warm_start_samples(parts)
    policy = build.build_policy(parts, sft.optim, steps=sft.steps, max_tokens_per_batch=sft.max_tokens_per_batch)
    checkpoints, first = warm_checkpoints(folder), 0
    if (latest := checkpoints.latest()) is not None:
        saved = checkpoints.load(latest)
        policy.load_state_dict(saved["policy"])
        first = int(saved["step"])
        logger.info("warm start: going on at step %d", first)
    settings = SftSettings(
        steps=sft.steps, batch_size=sft.batch_size, seed=parts.place.config.seed, max_seconds=sft.max_seconds
    )
    with Signals() as signals:
        steps = run_sft(
            policy,
            samples,
            settings,
            on_step=lambda step, m: observer.on_sft(step, sft.steps, m),
            first_step=first,
            should_stop=lambda: bool(signals.received),
        )
    observer.end_sft()
    if isinstance(policy, DistributedPolicy):
        policy.gather()  # training starts from the whole weights
    if signals.received:
        state = {"policy": policy.state_dict(), "step": steps}
        checkpoints.save(steps, state, export=build.exporter(parts))
        logger.warning("interrupted at step %d of the warm start; go on with: %s", steps, again)
        raise SystemExit(128 + signals.received[0])
    shutil.rmtree(checkpoints.folder, ignore_errors=True)
    return Spent(steps, policy.train_seconds)


def report_table(before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the before/after table; three sets fit a narrow terminal, and what nothing was measured on has no row."""
    assert set(ROWS) <= {f.name for f in fields(EvalReport)}
    table = Table(title="before and after", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("before → after", no_wrap=True)
    for name in after:
        table.add_column(name, justify="right", no_wrap=True)
    for key, label in ROWS.items():
        if all(math.isnan(one.get(key, math.nan)) for one in (*before.values(), *after.values())):
            continue  # nothing that it could be measured on, such as calls where there are no tools
        table.add_row(label, *(_cell(key, before.get(name, {}), after[name]) for name in after))
    return table


def _cell(key: str, before: Mapping[str, float], after: Mapping[str, float]) -> str:
    def show(value: float) -> str:
        if math.isnan(value):
            return "-"
        return f"{value:.2f}" if key == "mean_turns" else f"{100 * value:.1f}"

    unit = "" if key == "mean_turns" else " %"
    return f"{show(before.get(key, math.nan))} → {show(after[key])}{unit}"


async def _until_done(trainer: Trainer, parts: build.Parts, signals: Signals, *, again: str) -> LoopState:
    """Run `trainer`; SIGINT and SIGTERM cancel it, so that it leaves a checkpoint, and end with 128 + their number.

    A second signal of the same kind ends the process at once; the checkpoint before is whole.
    """
    task = asyncio.ensure_future(trainer.run())
    loop = asyncio.get_running_loop()
    signals.on_signal = lambda: loop.call_soon_threadsafe(task.cancel)
    if signals.received:
        task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        if not signals.received:
            raise
        logger.warning("interrupted at step %d; go on with: %s", trainer.state.step, again)
        raise SystemExit(128 + signals.received[0]) from None
    finally:
        signals.on_signal = lambda: None
        await parts.context.close()
