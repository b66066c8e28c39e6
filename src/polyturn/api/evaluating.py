"""Run an evaluation of a model that this process loads, or of a model behind an HTTP endpoint.

A new run folder contains the trajectories, the resolved config and report.json: for each set the report and, under
"statistics", means with intervals, pass@k, maj@k and success by turn budget, for all tasks and by data source.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from polyturn import build
from polyturn.api.folders import ANOTHER_FOLDER, keep_tokenizer, new_run_folder
from polyturn.api.signals import CANCELLING, Signals, until_done
from polyturn.config.load import write_resolved
from polyturn.core.errors import ConfigError
from polyturn.core.seeds import derive_seed
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.engines.chat_completions import Endpoint
from polyturn.evaluation.evaluate import EvalSet, evaluate
from polyturn.evaluation.report import EvalReport
from polyturn.evaluation.statistics import Statistics, statistics
from polyturn.infra.console import stderr_console
from polyturn.infra.loop import run_loop
from polyturn.infra.writable import check_writable
from polyturn.rollout.pool import RolloutPool
from polyturn.training.observer import AlsoRecord, RunObserver

UNTOUCHED = "untouched"
"""Prefix of the names of sets that are evaluated before a warm start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedSet:
    """The result of one evaluation set."""

    report: EvalReport
    statistics: Mapping[str, Statistics]

    def to_json(self) -> dict[str, Any]:
        """Return the result as data for JSON, in which undefined shares are null."""
        report = {k: None if math.isnan(v) else v for k, v in dataclasses.asdict(self.report).items()}
        return {**report, "statistics": {k: s.to_json() for k, s in self.statistics.items()}}


class Evaluation(NamedTuple):
    """The result of an evaluation."""

    folder: Path
    sets: dict[str, EvaluatedSet]


def evaluate_sets(
    source: build.ConfigSource,
    resolved: Mapping[str, Any],
    *,
    checkpoint: Path | None = None,
    signals: Callable[..., Signals] = Signals,
) -> Evaluation:
    """Run the evaluation sets of a configuration; write the trajectories and report.json to a new run folder."""
    sets = _sets(source)
    check_writable(Path(source.config.out), instead=ANOTHER_FOLDER)
    check = functools.partial(build.check_first_tasks, source, {"evaluation.data": sets[0].tasks})
    parts = build.build_parts(build.untrained(source), checkpoint=build.model_folder(checkpoint), check=check)
    parts = build.with_workers(parts)
    tasks = build.fitting(parts, sets[0].tasks, name="evaluation.data")
    sets = [dataclasses.replace(one, tasks=tasks) for one in sets]
    build.check_eval_sets(parts, sets)
    build.check_run(parts, tasks, name="evaluation.data")
    folder = _new_folder(source, resolved)
    keep_tokenizer(parts, folder)
    also = build.build_records(parts, sets)
    with RunObserver(folder, total_steps=0, console=stderr_console(), also=also) as observer:
        work = evaluate_all(build.pool_of(parts), source.config.seed, sets, observer)
        evaluated = run_loop(until_done(work, signals(message=CANCELLING)))
    return _reported(folder, evaluated)


def evaluate_endpoint(source: build.ConfigSource, resolved: Mapping[str, Any], endpoint: Endpoint) -> Evaluation:
    """Run the evaluation sets on a served model; the packages for training are not needed."""
    sets = [build.for_endpoint(one) for one in _sets(source)]
    check_writable(Path(source.config.out), instead=ANOTHER_FOLDER)
    context, engine = build.build_endpoint_context(source, endpoint)
    build.check_endpoint_run(context, sets[0].tasks, name="evaluation.data")
    folder = _new_folder(source, resolved)
    context.codec.tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "endpoint.json").write_text(json.dumps({"url": endpoint.url, "model": endpoint.model}, indent=2) + "\n")
    also = AlsoRecord(success_at=source.config.evaluation.success_at)
    with RunObserver(folder, total_steps=0, console=stderr_console(), also=also) as observer:
        pool = build.rollout_pool(source, context)
        running = evaluate_all(pool, source.config.seed, sets, observer, finish=engine.finish)
        evaluated = run_loop(running)
    return _reported(folder, evaluated)


def _reported(folder: Path, evaluated: dict[str, EvaluatedSet]) -> Evaluation:
    data = {name: one.to_json() for name, one in evaluated.items()}
    (folder / "report.json").write_text(json.dumps(data, indent=2) + "\n")
    return Evaluation(folder, evaluated)


def _sets(source: build.ConfigSource) -> list[EvalSet]:
    sets = build.build_eval_sets(source)
    if not sets:
        raise ConfigError("evaluation.data is not set: there are no tasks to evaluate on; set it (in Python: tasks=rows)")
    return sets


def _new_folder(source: build.ConfigSource, resolved: Mapping[str, Any]) -> Path:
    folder = new_run_folder(Path(source.config.out) / f"{source.config.name}-eval")
    write_resolved(resolved, folder / "config.yaml", base=source.base)
    return folder


def evaluate_untouched(
    source: build.ConfigSource, sets: Sequence[EvalSet], observer: RunObserver
) -> Coroutine[Any, Any, dict[str, EvaluatedSet]]:
    """Evaluate the model before its warm start; the sets are named `untouched NAME` in the run's records.

    The evaluation builds its own parts: a plug-in works only in the event loop that first called it, and training runs in
    another event loop.
    """
    source = dataclasses.replace(build.untrained(source), reads_parts=False, adapters={})
    parts = build.with_workers(build.build_parts(source))
    sets = [dataclasses.replace(one, name=f"{UNTOUCHED} {one.name}") for one in sets]
    return evaluate_all(build.pool_of(parts), source.config.seed, sets, observer)


async def evaluate_all(
    pool: RolloutPool,
    seed: int,
    sets: Sequence[EvalSet],
    observer: RunObserver,
    *,
    finish: Callable[[TrajectoryGroup], TrajectoryGroup] | None = None,
) -> dict[str, EvaluatedSet]:
    """Evaluate the sets one after another, and close the pool."""
    out = {}
    observer.watch(pool.context.running)
    try:
        for which in sets:
            observer.begin_phase(f"eval/{which.name}", len(which.tasks))
            result = await evaluate(
                pool,
                which,
                seed=derive_seed(seed, "eval"),
                on_group=lambda group, which=which: observer.on_group(  # type: ignore[misc]
                    group, phase=f"eval/{which.name}", total=len(which.tasks)
                ),
                finish=finish,
            )
            observer.on_eval(0, which.name, result.report, result.groups)
            report = statistics(result.groups, success_at=which.success_at, seed=seed)
            out[which.name] = EvaluatedSet(report=result.report, statistics=report)
    finally:
        await pool.close()
    return out
