"""`polyturn eval`: the evaluation sets of a config, on any weights, without training."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from polyturn import build
from polyturn.cli.console import Output, stderr_console
from polyturn.cli.runs import keep_tokenizer, model_folder, new_run_folder, open_place
from polyturn.config.load import write_resolved
from polyturn.core.errors import ConfigError
from polyturn.evaluation.evaluate import EvalSet, evaluate
from polyturn.evaluation.report import EvalReport
from polyturn.rollout.context import derive_seed
from polyturn.training.observer import RunObserver


def run(path: Path, overrides: Sequence[str], *, checkpoint: Path | None) -> None:
    """Evaluate, print a table, and leave the trajectories and a report.json in a run folder of their own."""
    place, resolved = open_place(path, overrides)
    sets = build.build_eval_sets(place)
    if not sets:
        raise ConfigError("evaluation.data is not set: there are no tasks to evaluate on")
    parts = build.build_parts(place, checkpoint=model_folder(checkpoint))
    tasks = build.fitting(parts, sets[0].tasks, name="evaluation.data")
    sets = [dataclasses.replace(one, tasks=tasks) for one in sets]
    build.check_run(parts, tasks, name="evaluation.data")
    folder = new_run_folder(Path(place.config.out) / f"{place.config.name}-eval")
    write_resolved(resolved, folder / "config.yaml")
    keep_tokenizer(parts, folder)
    also = build.build_records(parts, sets, environ=os.environ)
    with RunObserver(folder, total_steps=0, console=stderr_console(), also=also) as observer:
        reports = asyncio.run(_all(parts, sets, observer))
    (folder / "report.json").write_text(
        json.dumps({name: dataclasses.asdict(r) for name, r in reports.items()}, indent=2) + "\n"
    )
    table = Table("", *reports)
    for field in dataclasses.fields(EvalReport):
        table.add_row(field.name.replace("_", " "), *(f"{getattr(r, field.name):.3f}" for r in reports.values()))
    out = Output()
    out.table(table)
    out.fact("report", folder / "report.json")
    out.fact("look at them", f"polyturn show {folder}")


async def _all(parts: build.Parts, sets: Sequence[EvalSet], observer: RunObserver) -> dict[str, EvalReport]:
    config = parts.place.config
    out = {}
    for which in sets:
        result = await evaluate(
            parts.context,
            which,
            max_concurrent=config.rollout.max_concurrent,
            max_failed_share=config.rollout.max_failed_share,
            seed=derive_seed(config.seed, "eval"),
            on_group=lambda group, which=which: observer.on_group(  # type: ignore[misc]
                group, phase=f"eval/{which.name}", total=len(which.tasks)
            ),
        )
        observer.on_eval(0, which.name, result.report, result.groups)
        out[which.name] = result.report
    await parts.engine.close()
    return out
