"""`polyturn eval`: the evaluation sets of a config, on any weights or any served model, without training."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from polyturn.api.evaluating import Evaluation, evaluate_endpoint, evaluate_sets
from polyturn.api.folders import open_source
from polyturn.cli.console import Output, command
from polyturn.engines.chat_completions import Endpoint
from polyturn.evaluation.report import EvalReport
from polyturn.evaluation.statistics import Statistics


def run(
    path: Path, overrides: Sequence[str], *, checkpoint: Path | None, model: str | None = None, as_json: bool = False
) -> None:
    """Evaluate, print tables, and leave the trajectories and a report.json in a run folder of their own."""
    model_overrides = (
        [] if model is None else _model_overrides(str(Path(model).resolve()) if Path(model).is_dir() else model)
    )
    source, resolved = open_source(path, [*model_overrides, *overrides])
    _show(evaluate_sets(source, resolved, checkpoint=checkpoint), as_json=as_json)


def run_endpoint(path: Path, overrides: Sequence[str], endpoint: Endpoint, *, as_json: bool = False) -> None:
    """Evaluate a model that is served elsewhere; nothing of training needs to be installed."""
    source, resolved = open_source(path, [*_model_overrides(endpoint.model), *overrides])
    _show(evaluate_endpoint(source, resolved, endpoint), as_json=as_json)


def _model_overrides(model: str) -> list[str]:
    """Return the overrides that make a config use another model in place of its own."""
    nothing = [f"model.{name}=null" for name in ("init", "tokenizer", "lora")]
    return [f"model.path={json.dumps(model)}", *nothing]


def _show(evaluation: Evaluation, *, as_json: bool) -> None:
    folder, sets = evaluation
    out = Output()
    if as_json:
        out.text(json.dumps({"folder": str(folder), "sets": {name: one.to_json() for name, one in sets.items()}}))
        return
    table = Table("", *sets)
    for field in dataclasses.fields(EvalReport):
        numbers = (getattr(one.report, field.name) for one in sets.values())
        table.add_row(field.name.replace("_", " "), *(_cell(number, field.name) for number in numbers))
    out.table(table)
    for name, one in sets.items():
        out.table(statistics_table(name, one.statistics))
    out.fact("report", folder / "report.json")
    out.fact("look at them", command("show", folder))


def _cell(number: float, name: str) -> str:
    if math.isnan(number):  # nothing that it could be measured on, such as calls where there are no tools
        return "-"
    return f"{number:.0f}" if name.startswith("num_") else f"{number:.3f}"


def statistics_table(name: str, statistics: Mapping[str, Statistics]) -> Table:
    """Return a column for each data source and a row for each number, with its 95 % interval over tasks."""
    table = Table(f"{name}, 95 % intervals", *statistics)
    table.add_row("tasks / samples", *(f"{s.num_tasks} / {s.num_samples}" for s in statistics.values()))
    table.add_row("success", *(str(s.success) for s in statistics.values()))
    table.add_row("reward", *("-" if s.reward is None else str(s.reward) for s in statistics.values()))
    for title, pick in (
        ("pass@{}", lambda s: s.pass_at),
        ("maj@{}", lambda s: s.maj_at),
        ("success within {} turns", lambda s: s.within_turns),
    ):
        for k in sorted({k for s in statistics.values() for k in pick(s)}):
            if title != "pass@{}" or k > 1:
                table.add_row(title.format(k), *(str(pick(s).get(k, "-")) for s in statistics.values()))
    return table
