"""`polyturn sft`: supervised training alone, through the same tokens and loss weights as everything else."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Sequence
from pathlib import Path

from polyturn import build
from polyturn.api.console import stderr_console
from polyturn.api.folders import ANOTHER_FOLDER, new_run_folder, open_source
from polyturn.api.signals import Signals
from polyturn.cli.console import Output, command
from polyturn.config.load import write_resolved
from polyturn.core.errors import ConfigError
from polyturn.infra.folder_lock import hold_folder
from polyturn.infra.writable import check_writable
from polyturn.training.observer import RunObserver


def run(path: Path, overrides: Sequence[str], *, checkpoint: Path | None) -> None:
    """Train on the conversations of the config at `path`, and write the model.

    A `checkpoint` that is the folder of such a run, interrupted before its end, lets that run go on.
    """
    source, resolved = open_source(path, overrides)
    if source.config.warm_start.steps == 0:
        raise ConfigError("warm_start.steps is 0: there is nothing to train; set it, for instance warm_start.steps=200")
    if checkpoint is None:
        check_writable(Path(source.config.out), instead=ANOTHER_FOLDER)
    build.check_plugins(source)
    build.check_warm_start(source)
    from polyturn.api.warm_starting import warm_checkpoints, warm_start  # imports PyTorch, which takes seconds

    interrupted = checkpoint if checkpoint is not None and warm_checkpoints(checkpoint).latest() is not None else None
    folder = interrupted or Path(source.config.out) / f"{source.config.name}-sft"
    check_writable(interrupted or folder.parent, instead=ANOTHER_FOLDER)
    parts = build.build_parts(source, checkpoint=None if interrupted else build.model_folder(checkpoint))
    folder = interrupted or new_run_folder(folder)
    again = command("sft", path, *overrides, "--checkpoint", folder)
    keep_settings = functools.partial(write_resolved, resolved, folder / "config.yaml", base=source.base)
    out = Output()
    with hold_folder(folder):
        if interrupted is None:
            keep_settings()
        with RunObserver(folder, total_steps=0, console=stderr_console()) as observer, Signals() as signals:
            done = warm_start(parts, observer, signals, folder=folder, again=again, on_resume=keep_settings)
        saved = build.exporter(parts)(folder / "model")
        shutil.rmtree(warm_checkpoints(folder).folder, ignore_errors=True)
    out.fact("steps", done.steps)
    out.fact("metrics", folder / "sft_metrics.jsonl")
    out.fact("model", saved)
