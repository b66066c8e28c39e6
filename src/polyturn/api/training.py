"""A training run from start to end: folder, parts, checks, warm start, loop, result.

    run_training(source, resolved, …)  ->  TrainedRun(folder=runs/quickstart, steps=30, …)

Used by the command `polyturn train` and by the function `polyturn.train`. Checks that need no PyTorch run before PyTorch is
imported, because the import takes seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from polyturn import build
from polyturn.api.console import logging_to
from polyturn.api.folders import ANOTHER_FOLDER, keep_tokenizer, later_run, name_of, new_run_folder
from polyturn.api.signals import Signals, until_done
from polyturn.config.load import write_resolved
from polyturn.config.models import RunConfig
from polyturn.core.errors import CheckpointError, ConfigError, DataError, EngineLostError, PolyturnError, RankLostError
from polyturn.core.secrets import masked
from polyturn.infra.console import stderr_console
from polyturn.infra.contained import contained
from polyturn.infra.folder_lock import hold_folder
from polyturn.infra.loop import run_loop
from polyturn.infra.writable import check_writable
from polyturn.infra.yaml_file import read_yaml
from polyturn.tracking.plot import plot_learning_curve
from polyturn.training.observer import RunObserver
from polyturn.training.options import BACKEND
from polyturn.training.resume import changed_settings, require_same_groups

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from polyturn.build.parts import Plugins
    from polyturn.tools.toolbox import Toolbox
    from polyturn.training.loop import Trainer
    from polyturn.training.rank_group import RankGroup
    from polyturn.training.state import LoopState
    from polyturn.training.update import Revise

logger = logging.getLogger(__name__)

DryRun = Callable[[build.Parts, build.RunTasks], object]
"""Called with parts and tasks in place of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRun:
    """The result of a training run."""

    folder: Path
    state: LoopState
    wall_s: float
    generating_s: float
    training_s: float
    curve: Path | str
    """The picture of the learning curve, or the reason why there is none."""
    latest: Path | None
    """The newest checkpoint."""
    best: Path | None
    """The best checkpoint, if it is not the newest."""
    model: PreTrainedModel | None
    """The trained model; None if it is on ranks (load the newest checkpoint)."""
    tokenizer: PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a run outside its configuration."""

    again: Callable[[str], str]
    """Called with a run's name; returns the command or call that resumes this run, for messages."""
    resume: bool | Literal["auto"] = False
    """Whether to resume from the latest checkpoint of the run's folder; "auto": if there is one."""
    dry_run: DryRun | None = None
    """If set, the run is only checked, and this function is called with its parts and tasks."""
    signals: Callable[[], Signals] = Signals
    """Makes the handler that records an interruption."""
    on_folder: Callable[[Path], object] = lambda folder: None
    """Called with the run's folder when it is chosen."""
    revise: Callable[[int], Revise] | None = None
    """Called with the size of the vocabulary; returns the function that may change the samples of each step."""
    on_step: Callable[[int, Mapping[str, float]], object] = lambda step, metrics: None
    """Called with the metrics of each step."""

    def __post_init__(self) -> None:
        if self.resume not in (True, False, "auto"):
            raise ConfigError(
                f"resume is {self.resume!r:.80}; write resume=True to resume from the newest checkpoint of the run "
                "name=…, or resume='auto' if there may be none"
            )


def run_training(source: build.ConfigSource, resolved: Mapping[str, Any], options: RunOptions) -> TrainedRun | None:
    """Train a run, and return the result; None for a dry run. `resolved` is the configuration for `write_resolved`.

    Raises:
        PolyturnError: the run cannot work, or one of its parts failed.
    """
    _refuse_launchers()
    config = source.config
    build.check_ranks(config)
    if config.train.distributed.ranks == 1 and config.train.distributed.gradient_sync == "last":
        logger.warning("train.distributed.gradient_sync is last, which has no effect with one rank")
    attempt = _Attempt(source=source, resume=options.resume)
    restarts = 0 if options.dry_run is not None else config.cluster.restarts
    for left in range(restarts, -1, -1):
        try:
            with attempt.locks:
                return _train(attempt, resolved, options)
        except (RankLostError, EngineLostError) as problem:
            if not left:
                raise
            restart = "The run restarts, from its latest checkpoint if any; restarts left after this one"
            logger.warning("%s\n%s: %d", problem, restart, left - 1)
            build.close_adapters(attempt.source)
            source = replace(source, adapters={})
            if not attempt.name:  # the attempt ended before it chose a folder, so it left nothing to resume
                attempt = _Attempt(source=source, resume=attempt.resume)
                continue
            named = config.model_copy(update={"name": attempt.name})
            attempt = _Attempt(source=replace(source, config=named), resume="auto")
    raise AssertionError("the last attempt returns or raises")


def _refuse_launchers() -> None:
    """Raise in a process of torchrun or another launcher of ranks, because each process would train a whole run."""
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "")
    if rank is not None and size.isdecimal() and int(size) > 1:
        raise ConfigError(
            f"the environment has RANK={rank} and WORLD_SIZE={size}, as under torchrun, but polyturn starts its ranks "
            "itself; start it once: `polyturn train FILE --nproc N`, in Python polyturn.train(…, ranks=N), on several "
            "machines with Ray (--ray); if the variables have another purpose, unset WORLD_SIZE"
        )


@dataclass(slots=True)
class _Attempt:
    """One attempt to train a run to its end."""

    source: build.ConfigSource
    resume: bool | Literal["auto"]
    name: str = ""
    """Name for the run's folder; "" before it is chosen."""
    locks: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Closed at the end of the attempt: the lock of the folder, and the ranks that this process started."""


class _Prepared(NamedTuple):
    """A run that is ready to start or resume."""

    parts: build.Parts
    tasks: build.RunTasks
    folder: Path
    latest: Path | None
    """The training checkpoint to resume from; None if training has not begun."""


def _prepare(attempt: _Attempt, resolved: Mapping[str, Any], options: RunOptions) -> _Prepared | None:
    """Build and check all parts of a run, and choose its folder; None for a dry run.

    Raises:
        CheckpointError: there is no checkpoint to resume from.
        ConfigError, DataError: the run cannot work.
    """
    source, resume = replace(attempt.source, is_plan=options.dry_run is not None), attempt.resume
    config = source.config
    folder = Path(config.out) / config.name
    if config.train.steps == 0 and config.train.epochs is None:
        instead = "" if config.warm_start.steps else "; use polyturn eval or polyturn.evaluate to only evaluate a model"
        logger.warning("train.steps is 0, so no training step is taken%s", instead)
    check_writable(folder if resume else folder.parent, instead=ANOTHER_FOLDER)
    build.check_plugins(source)
    build.check_workers(config)
    tasks = build.build_run_tasks(source)
    latest, before = None, {}
    if resume:
        # Checked once: a folder that appears while this process loads PyTorch belongs to another process.
        is_there = folder.is_dir()
        if is_there and options.dry_run is None:
            attempt.locks.enter_context(hold_folder(folder))
        if is_there:
            _refuse_links(folder)
        latest, former = _checkpoints_of(folder, config) if is_there else (None, None)
        if former is None and resume != "auto":
            raise CheckpointError(
                f"there is no checkpoint under {folder / 'checkpoints'} to resume from; train without resume, or set "
                "name=… to another run"
            )
        if former is None:
            resume = False
            attempt.locks.close()  # the run gets a new folder
        if resume and (later := later_run(folder)) is not None:
            named = name_of(later, config.out)
            logger.warning("resuming %s; a later run of that name is in %s (name=%s)", folder, later, named)
        if resume:
            before = former_settings(folder / "config.yaml")
            if latest is not None:
                require_same_groups(before, resolved, path=latest)
    if config.cluster.address is not None:
        build.check_cluster(config)
    if config.cluster.address is not None and options.dry_run is None:
        build.check_before_weights(source, tasks, None, None)
        parts = build.cluster_parts(source)
    else:
        source = replace(source, reads_parts=not (source.is_plan or build.holds_weights(source)))
        rank_group: RankGroup | None = None

        def check(plugins: Plugins | None, tools: Toolbox) -> None:
            nonlocal rank_group
            build.check_before_weights(source, tasks, plugins, tools)
            if source.is_plan:
                return
            from polyturn.build.memory_plan import require_memory  # imports PyTorch

            require_memory(source)
            if config.train.distributed.ranks > 1:  # ranks start while the model is loaded here
                rank_group = attempt.locks.enter_context(contextlib.closing(build.start_ranks(source)))

        parts = build.build_parts(source, check=check)
        parts = replace(parts, rank_group=rank_group)
    parts, tasks = build.settle(parts, tasks)
    build.check_training(parts, tasks)
    if options.dry_run is not None:
        options.dry_run(parts, tasks)
        return None
    if config.train.backend != BACKEND and parts.rank_group is None:
        parts = build.with_rank_here(parts)
    parts = build.with_workers(parts)
    if not resume:
        folder = new_run_folder(folder)
        attempt.locks.enter_context(hold_folder(folder))
    attempt.name = name_of(folder, config.out)
    if resume:
        with logging_to(folder / "log.txt"):
            tell_changes(before, resolved)
    else:
        _keep_settings(parts, folder, resolved)
    options.on_folder(folder)
    return _Prepared(parts, tasks, folder, latest)


def _refuse_links(folder: Path) -> None:
    """Raise if parts of a run's folder are links to outside, through which a resumed run would read and write."""
    for name in ("checkpoints", "trajectories", "warm_start", "journal"):
        try:
            contained(folder, name)
        except DataError as problem:
            raise CheckpointError(
                f"{folder / name} is a symbolic link out of the run's folder, through which a resumed run would read "
                "and write; move its target into the folder, or move the whole run there (out=…)"
            ) from problem


def _checkpoints_of(folder: Path, config: RunConfig) -> tuple[Path | None, Path | None]:
    """Return the newest training checkpoint in a run's folder, and the checkpoint to resume from.

    The second is the training checkpoint, or without one the newest checkpoint of the warm start.

    Raises:
        CheckpointError: the checkpoint's adapter has another shape than the configured one.
    """
    from polyturn.api.warm_starting import warm_checkpoints
    from polyturn.training.checkpoint import MODEL, Checkpoints
    from polyturn.training.lora import CONFIG_FILE, require_same_settings

    latest = Checkpoints(folder / "checkpoints").latest()
    former = latest or warm_checkpoints(folder).latest()
    if former is not None and config.model.lora is not None and (former / MODEL / CONFIG_FILE).is_file():
        require_same_settings(former / MODEL, rank=config.model.lora.rank, alpha=config.model.lora.alpha)
    return latest, former


def _train(attempt: _Attempt, resolved: Mapping[str, Any], options: RunOptions) -> TrainedRun | None:
    """Train a run to its end; None for a dry run."""
    began = time.monotonic()
    prepared = _prepare(attempt, resolved, options)
    if prepared is None:
        return None
    from polyturn.api.warm_starting import Spent, warm_start

    parts, tasks, folder, latest = prepared
    config = parts.source.config
    line = options.again(attempt.name)
    # Only after loading the checkpoint, so that a failure keeps the run's former settings.
    keep_settings = functools.partial(_keep_settings, parts, folder, resolved)
    also = replace(build.build_records(parts, tasks.eval_sets, environ=os.environ), on_step=options.on_step)
    rank_group = contextlib.nullcontext() if parts.rank_group is None else contextlib.closing(parts.rank_group)
    with (
        rank_group,
        logging_to(folder / "log.txt"),
        RunObserver(folder, total_steps=config.train.steps, console=stderr_console(), also=also) as observer,
        options.signals() as signals,
    ):
        warm, untouched = Spent(), {}
        if latest is None:
            untouched = _untouched(parts, tasks, observer, signals, folder=folder)
            warm = warm_start(parts, observer, signals, folder=folder, again=line, on_resume=keep_settings)
        trainer = build.build_trainer(parts, tasks, folder=folder, observer=observer)
        if untouched:
            trainer.state.reports["untouched"] = untouched
        if options.revise is not None:
            trainer.update.revise = options.revise(int(parts.model.config.get_text_config().vocab_size))
        if latest is not None:
            loading = time.monotonic()
            trainer.resume(latest)
            keep_settings()
            observer.resume(trainer.state.step)
            logger.info("resumed in %.2f s, without loading the model", time.monotonic() - loading)
            if trainer.state.step >= config.train.steps:
                logger.warning(
                    "the run is complete: it has taken %d steps, and train.steps is %d; raise train.steps to continue",
                    trainer.state.step,
                    config.train.steps,
                )
        with _frozen():
            try:
                state = run_loop(_trained(trainer, parts, signals, again=line))
            except KeyboardInterrupt:
                end = _ended(trainer, again=line)
                logger.warning("interrupted twice, so the run ended without another checkpoint, %s", end)
                raise
    best = trainer.checkpoints.best() if state.best > 0 else None
    return TrainedRun(
        folder=folder,
        state=state,
        wall_s=time.monotonic() - began,
        generating_s=parts.busy_s,
        training_s=warm.train_s + trainer.policy.train_seconds,
        curve=_curve(folder, title=config.name),
        latest=trainer.checkpoints.latest(),
        best=None if best == trainer.checkpoints.latest() else best,
        model=None if parts.rank_group is not None else parts.model,
        tokenizer=parts.tokenizer,
    )


def _keep_settings(parts: build.Parts, folder: Path, resolved: Mapping[str, Any]) -> None:
    named = {**resolved, "name": name_of(folder, parts.source.config.out)}
    write_resolved(named, folder / "config.yaml", base=parts.source.base)
    keep_tokenizer(parts, folder)


def _curve(folder: Path, *, title: str) -> Path | str:
    try:
        return plot_learning_curve(folder / "metrics.jsonl", folder / "curve.png", title=title)
    except PolyturnError as problem:
        return f"none: {problem}"


def tell_changes(former: Mapping[str, Any], resolved: Mapping[str, Any]) -> None:
    """Log the settings of a resumed run that differ from its former ones."""
    for line in changed_settings(former, masked(resolved)) if former else ():
        logger.warning("resumed with another setting: %s", line)


def former_settings(path: Path) -> dict[str, Any]:
    """Return the settings in the file `path` of a run's folder; if it cannot be read, warn and return {}."""
    try:
        return read_yaml(path)
    except ConfigError as problem:
        logger.warning("the former settings of this run cannot be read, so changes are not listed (%s)", problem)
        return {}


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """Exclude existing objects, which live as long as the run, from garbage collection: each pass would take 0.3 s.

    If the program has frozen objects, do nothing, because `gc.unfreeze` would unfreeze those too.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _untouched(
    parts: build.Parts, tasks: build.RunTasks, observer: RunObserver, signals: Signals, *, folder: Path
) -> dict[str, dict[str, float]]:
    """Evaluate the model before its warm start, if configured, and return the metrics of each set."""
    from polyturn.api.evaluating import UNTOUCHED, evaluate_untouched
    from polyturn.api.warm_starting import warm_checkpoints

    config = parts.source.config
    if not config.warm_start.steps or not tasks.eval_sets or warm_checkpoints(folder).latest() is not None:
        return {}
    if not config.evaluation.before_warm_start:
        if config.evaluation.before:
            logger.info(
                "the first evaluation is after the warm start; set evaluation.before_warm_start to also evaluate the "
                "untouched model"
            )
        return {}
    work = evaluate_untouched(parts.source, tasks.eval_sets, observer)
    untouched = run_loop(until_done(work, signals, message=lambda: "interrupted before the warm start; start again"))
    return {name.removeprefix(f"{UNTOUCHED} "): dataclasses.asdict(one.report) for name, one in untouched.items()}


async def _trained(trainer: Trainer, parts: build.Parts, signals: Signals, *, again: str) -> LoopState:
    """Run `trainer`; an interruption leaves a checkpoint, a second one ends the run at once."""
    trainer.is_abandoned = lambda: signals.is_repeated
    try:
        return await until_done(
            trainer.run(),
            signals,
            message=lambda: f"interrupted {_ended(trainer, again=again)}",
            lost=(lambda: None) if parts.rank_group is None else parts.rank_group.lost,
        )
    finally:
        await (parts.pool or parts.context).close()


def _ended(trainer: Trainer, *, again: str) -> str:
    """Return the step at which a run was interrupted, how much of it is saved, and how to go on."""
    step, latest = trainer.state.step, trainer.checkpoints.latest()
    if latest is None:
        return f"at step {step}, before its first checkpoint; start again"
    saved = trainer.checkpoints.latest_step()
    kept = f"which is saved in {latest}" if saved == step else f"and the latest checkpoint is {latest}"
    return f"at step {step}, {kept}; resume with: {again}"
