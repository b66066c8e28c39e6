"""`polyturn sft`: supervised training only."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

from polyturn.cli.arguments import CheckpointOption, ConfigArgument, Overrides, declare
from polyturn.cli.console import Output, command
from polyturn.cli.dialects import begin
from polyturn.core.errors import ConfigError


@declare("sft")
def main(config: ConfigArgument, overrides: Overrides = None, checkpoint: CheckpointOption = None) -> None:
    """Train on conversations, or on a run's best trajectories. Only the section `warm_start` of the config is run."""
    changes = overrides or []
    begin(config, changes)
    from polyturn import build
    from polyturn.api.folders import ANOTHER_FOLDER, new_run_folder, open_source
    from polyturn.api.signals import Signals
    from polyturn.config.load import write_resolved
    from polyturn.infra.console import stderr_console
    from polyturn.infra.folder_lock import hold_folder
    from polyturn.infra.writable import check_writable
    from polyturn.training.observer import RunObserver

    source, resolved = open_source(config, changes)
    if source.config.warm_start.steps == 0:
        raise ConfigError("warm_start.steps is 0, so nothing would be trained; set it, for instance warm_start.steps=200")
    if checkpoint is None:
        check_writable(Path(source.config.out), instead=ANOTHER_FOLDER)
    build.check_plugins(source)
    build.check_warm_start(source)
    from polyturn.api.warm_starting import warm_checkpoints, warm_start  # imports PyTorch, which takes seconds

    # If --checkpoint is the folder of an interrupted run of this command, resume that run.
    interrupted = checkpoint if checkpoint is not None and warm_checkpoints(checkpoint).latest() is not None else None
    folder = interrupted or Path(source.config.out) / f"{source.config.name}-sft"
    check_writable(interrupted or folder.parent, instead=ANOTHER_FOLDER)
    parts = build.build_parts(source, checkpoint=None if interrupted else build.model_folder(checkpoint))
    folder = interrupted or new_run_folder(folder)
    again = command("sft", config, *changes, "--checkpoint", folder)
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
