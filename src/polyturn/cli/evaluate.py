"""`polyturn eval`: the evaluation sets of a config, on any weights or any served model, without training.

It prints tables, and writes the trajectories and report.json to a new run folder.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from polyturn.cli.arguments import CheckpointOption, ConfigArgument, JsonFlag, Overrides, declare, is_given, refuse_unused
from polyturn.cli.console import Output, command
from polyturn.cli.dialects import begin
from polyturn.core.errors import ConfigError

if TYPE_CHECKING:
    from polyturn.api.evaluating import Evaluation
    from polyturn.evaluation.statistics import Statistics

logger = logging.getLogger(__name__)


@declare("eval")
def main(
    context: typer.Context,
    config: ConfigArgument,
    overrides: Overrides = None,
    checkpoint: CheckpointOption = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder or hub id of a model, in place of the config's; with --endpoint, the model's name on the server."
        ),
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="OpenAI-compatible server to evaluate, e.g. http://host:8000/v1.")
    ] = None,
    key_env: Annotated[str, typer.Option(help="Environment variable with the endpoint's key.")] = "OPENAI_API_KEY",
    concurrency: Annotated[int, typer.Option(min=1, help="With --endpoint: largest number of concurrent requests.")] = 32,
    request_timeout: Annotated[
        float, typer.Option(min=0.1, help="With --endpoint: deadline of one try, in seconds.")
    ] = 300.0,
    tries: Annotated[int, typer.Option(min=1, help="With --endpoint: number of tries per request.")] = 6,
    as_json: JsonFlag = False,
) -> None:
    """Evaluate a checkpoint, a model, or a model behind an endpoint. The config's section `evaluation` sets the tasks."""
    if endpoint is None:
        refuse_unused(context, {"config", "overrides", "checkpoint", "model", "as_json"}, here="without --endpoint")
    elif not model or checkpoint is not None:
        raise ConfigError("--endpoint needs --model NAME, the model's name at the endpoint, and takes no --checkpoint")
    elif key_env not in os.environ and is_given(context, "key_env"):
        raise ConfigError(f"--key-env {key_env}: this environment variable is not set; set it to the endpoint's key")
    if not model:
        begin(config, overrides or [])
    from polyturn.api.evaluating import evaluate_endpoint, evaluate_sets
    from polyturn.api.folders import open_source
    from polyturn.engines.chat_completions import Endpoint

    changes = overrides or []
    if model is not None:
        path = str(Path(model).resolve()) if endpoint is None and Path(model).is_dir() else model
        unset = [f"model.{name}=null" for name in ("init", "tokenizer", "lora")]
        changes = [f"model.path={json.dumps(path)}", *unset, *changes]
    source, resolved = open_source(config, changes)
    _warn_of_sampling(changes, set_name=next(iter(source.config.evaluation.sets), "greedy"))
    if endpoint is None or model is None:
        _show(evaluate_sets(source, resolved, checkpoint=checkpoint), as_json=as_json)
        return
    served = Endpoint(
        url=endpoint,
        model=model,
        key=os.environ.get(key_env),
        max_concurrent=concurrency,
        timeout_s=request_timeout,
        max_tries=tries,
    )
    _show(evaluate_endpoint(source, resolved, served), as_json=as_json)


def _warn_of_sampling(overrides: Sequence[str], *, set_name: str) -> None:
    """Warn of overrides of the sampling in training, which evaluation sets do not use."""
    section = "rollout.sampling"
    keys = {one: one.partition("=")[0].strip().lstrip("+") for one in overrides}
    written = [one for one, key in keys.items() if key == section or key.startswith(f"{section}.")]
    if written:
        instead = shlex.join(one.replace(section, f"evaluation.sets.{set_name}.sampling", 1) for one in written)
        logger.warning(
            "an evaluation set has its own sampling, so %s does not change it; write %s", shlex.join(written), instead
        )


def _show(evaluation: Evaluation, *, as_json: bool) -> None:
    from polyturn.evaluation.report import EvalReport

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
    if math.isnan(number):  # undefined, such as the share of valid calls without tools
        return "-"
    return f"{number:.0f}" if name.startswith("num_") else f"{number:.3f}"


def statistics_table(name: str, statistics: Mapping[str, Statistics]) -> Table:
    """Return a table with a column per data source and a row per statistic, with 95 % intervals over tasks."""
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
