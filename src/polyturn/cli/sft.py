"""`polyturn sft`: supervised training alone, through the same tokens and loss weights as everything else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polyturn import build
from polyturn.api.console import stderr_console
from polyturn.api.folders import new_run_folder, open_place
from polyturn.api.training import warm_start
from polyturn.cli.console import Output, command
from polyturn.config.load import write_resolved
from polyturn.core.errors import ConfigError
from polyturn.training.observer import RunObserver


def run(path: Path, overrides: Sequence[str], *, checkpoint: Path | None) -> None:
    """Train on the conversations of the config at `path`, and write the model."""
    place, resolved = open_place(path, overrides)
    if place.config.warm_start.steps == 0:
        raise ConfigError("warm_start.steps is 0: there is nothing to train; set it, for instance warm_start.steps=200")
    parts = build.build_parts(place, checkpoint=build.model_folder(checkpoint))
    folder = new_run_folder(Path(place.config.out) / f"{place.config.name}-sft")
    write_resolved(resolved, folder / "config.yaml", base=place.base)
    out = Output()
    with RunObserver(folder, total_steps=0, console=stderr_console()) as observer:
        again = command("sft", path, *overrides, "--checkpoint", folder / "warm_start")
        steps = warm_start(parts, observer, folder=folder, again=again).steps
    saved = build.exporter(parts)(folder / "model")
    out.fact("steps", steps)
    out.fact("metrics", folder / "sft_metrics.jsonl")
    out.fact("model", saved)
