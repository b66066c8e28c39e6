"""`polyturn eval`: the evaluation sets of a config, on any weights or any served model, without training.

A run folder of its own holds the trajectories, the resolved config and report.json: for each set the report's numbers and,
under "statistics", means with intervals, pass@k, maj@k and success by turn budget, for all tasks and by data source.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from polyturn import build
from polyturn.cli.console import Output, command, stderr_console
from polyturn.cli.runs import keep_tokenizer, new_run_folder, open_place
from polyturn.config.load import write_resolved
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError
from polyturn.core.run_loop import run_loop
from polyturn.core.seeds import derive_seed
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.engines.chat_completions import ChatEngine, Endpoint
from polyturn.evaluation.evaluate import EvalSet, evaluate
from polyturn.evaluation.report import EvalReport
from polyturn.evaluation.statistics import Statistics, statistics
from polyturn.rollout.context import RolloutContext
from polyturn.training.observer import RunObserver


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedSet:
    """What one evaluation set showed."""

    report: EvalReport
    statistics: Mapping[str, Statistics]

    def to_json(self) -> dict[str, Any]:
        """Return it as data for JSON."""
        return {**dataclasses.asdict(self.report), "statistics": {k: s.to_json() for k, s in self.statistics.items()}}


def run(
    path: Path, overrides: Sequence[str], *, checkpoint: Path | None, model: str | None = None, as_json: bool = False
) -> None:
    """Evaluate, print tables, and leave the trajectories and a report.json in a run folder of their own."""
    given = [] if model is None else _model_overrides(str(Path(model).resolve()) if Path(model).is_dir() else model)
    place, resolved = open_place(path, [*given, *overrides])
    sets = _sets(place)
    parts = build.build_parts(place, checkpoint=build.model_folder(checkpoint))
    tasks = build.fitting(parts, sets[0].tasks, name="evaluation.data")
    sets = [dataclasses.replace(one, tasks=tasks) for one in sets]
    build.check_run(parts, tasks, name="evaluation.data")
    folder = _new_folder(place, resolved)
    keep_tokenizer(parts, folder)
    also = build.build_records(parts, sets)
    with RunObserver(folder, total_steps=0, console=stderr_console(), also=also) as observer:
        found = run_loop(_all(parts.context, place.config, sets, observer))
    _show(found, folder, as_json=as_json)


def run_endpoint(path: Path, overrides: Sequence[str], endpoint: Endpoint, *, as_json: bool = False) -> None:
    """Evaluate a model that is served elsewhere; nothing of training needs to be installed."""
    place, resolved = open_place(path, [*_model_overrides(endpoint.model), *overrides])
    sets = [build.for_endpoint(one) for one in _sets(place)]
    context = build.build_endpoint_context(place, endpoint)
    build.check_endpoint_run(context, sets[0].tasks, name="evaluation.data")
    folder = _new_folder(place, resolved)
    context.codec.tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "endpoint.json").write_text(json.dumps({"url": endpoint.url, "model": endpoint.model}, indent=2) + "\n")
    with RunObserver(folder, total_steps=0, console=stderr_console()) as observer:
        found = run_loop(_all(context, place.config, sets, observer))
    _show(found, folder, as_json=as_json)


def _model_overrides(model: str) -> list[str]:
    """Return what makes a config be about another model, whatever it said of its own."""
    nothing = [f"model.{name}=null" for name in ("init", "train_tokenizer", "tokenizer", "lora")]
    return [f"model.path={json.dumps(model)}", *nothing]


def _sets(place: build.ConfigSource) -> list[EvalSet]:
    sets = build.build_eval_sets(place)
    if not sets:
        raise ConfigError("evaluation.data is not set: there are no tasks to evaluate on")
    return sets


def _new_folder(place: build.ConfigSource, resolved: dict[str, Any]) -> Path:
    folder = new_run_folder(Path(place.config.out) / f"{place.config.name}-eval")
    write_resolved(resolved, folder / "config.yaml")
    return folder


async def _all(
    context: RolloutContext, config: RunConfig, sets: Sequence[EvalSet], observer: RunObserver
) -> dict[str, EvaluatedSet]:
    out = {}
    engine = context.engine
    finish: Callable[[TrajectoryGroup], TrajectoryGroup] | None = engine.finish if isinstance(engine, ChatEngine) else None
    try:
        for which in sets:
            result = await evaluate(
                context,
                which,
                max_concurrent=config.rollout.max_concurrent,
                max_failed_share=config.rollout.max_failed_share,
                seed=derive_seed(config.seed, "eval"),
                on_group=lambda group, which=which: observer.on_group(  # type: ignore[misc]
                    group, phase=f"eval/{which.name}", total=len(which.tasks)
                ),
                finish=finish,
            )
            observer.on_eval(0, which.name, result.report, result.groups)
            found = statistics(result.groups, success_at=which.success_at, seed=config.seed)
            out[which.name] = EvaluatedSet(report=result.report, statistics=found)
    finally:
        await context.close()
    return out


def _show(found: Mapping[str, EvaluatedSet], folder: Path, *, as_json: bool) -> None:
    data = {name: one.to_json() for name, one in found.items()}
    (folder / "report.json").write_text(json.dumps(data, indent=2) + "\n")
    out = Output()
    if as_json:
        out.text(json.dumps({"folder": str(folder), "sets": data}))
        return
    table = Table("", *found)
    for field in dataclasses.fields(EvalReport):
        numbers = (getattr(one.report, field.name) for one in found.values())
        table.add_row(field.name.replace("_", " "), *(_cell(number, field.name) for number in numbers))
    out.table(table)
    for name, one in found.items():
        out.table(statistics_table(name, one.statistics))
    out.fact("report", folder / "report.json")
    out.fact("look at them", command("show", folder))


def _cell(number: float, name: str) -> str:
    if math.isnan(number):  # nothing that it could be measured on, such as calls where there are no tools
        return "-"
    return f"{number:.0f}" if name.startswith("num_") else f"{number:.3f}"


def statistics_table(name: str, found: Mapping[str, Statistics]) -> Table:
    """Return a column for each data source and a row for each number, with its 95 % interval over tasks."""
    table = Table(f"{name}, 95 % intervals", *found)
    table.add_row("tasks / samples", *(f"{s.num_tasks} / {s.num_samples}" for s in found.values()))
    table.add_row("success", *(str(s.success) for s in found.values()))
    table.add_row("reward", *("-" if s.reward is None else str(s.reward) for s in found.values()))
    for title, pick in (
        ("pass@{}", lambda s: s.pass_at),
        ("maj@{}", lambda s: s.maj_at),
        ("success within {} turns", lambda s: s.within_turns),
    ):
        for k in sorted({k for s in found.values() for k in pick(s)}):
            if title != "pass@{}" or k > 1:
                table.add_row(title.format(k), *(str(pick(s).get(k, "-")) for s in found.values()))
    return table
