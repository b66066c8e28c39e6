"""Converters for verl's `trainer`: the length of a run, its devices, folder and loggers."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.core.errors import did_you_mean

if TYPE_CHECKING:
    from polyturn.config.translate.source import Source

KEEP_ALL = 1_000_000
TRACKERS = {
    "tensorboard": ("tensorboard", ""),
    "wandb": ("wandb", "project"),
    "mlflow": ("mlflow", "experiment"),
    "trackio": ("trackio", "project"),
}
"""Logger -> (module that its tracker needs, option for trainer.project_name)."""
NO_TRACKERS = ("vemlp_wandb", "swanlab", "clearml", "rl_insight")


def steps(s: Source) -> None:
    """Set the length of the run, in steps or in passes over the tasks."""
    if (total := s.get("trainer.total_training_steps")) is not None:
        s.put("train.steps", total, by="trainer.total_training_steps")
    else:
        s.put("train.epochs", s.get("trainer.total_epochs", 30), by="trainer.total_epochs")


def run_folder(s: Source) -> None:
    """Set the folder of the run."""
    key = "trainer.default_local_dir"
    folder = Path(os.path.expanduser(s.text(key, "checkpoints/verl_examples/gsm8k")))
    s.put("out", str(folder.parent), by=key)
    s.put("name", folder.name, by=key)
    s.read |= {k for k in ("trainer.project_name", "trainer.experiment_name") if str(s.values.get(k)) in folder.parts}


def every(s: Source) -> None:
    """Set the intervals of saving and validation."""
    for key, native in (("trainer.save_freq", "train.checkpoint_every"), ("trainer.test_freq", "evaluation.every")):
        s.put(native, max(0, s.whole(key, -1, least=-1)), by=key)


def trackers(s: Source) -> None:
    """Set the configured trackers; verl's default, wandb, is used only if it was written."""
    key = "trainer.logger"
    if key not in s.written:
        return
    value = s.get(key, [])
    trackers: list[dict[str, Any]] = []
    missing: list[str] = []
    for name in [value] if isinstance(value, str) else list(value):
        if name in TRACKERS and importlib.util.find_spec(TRACKERS[name][0]) is not None:
            project = TRACKERS[name][1]
            trackers.append({"name": name, **({project: s.get("trainer.project_name")} if project else {})})
        elif name in TRACKERS or name in NO_TRACKERS:
            missing.append(str(name))
        elif name not in ("console", "file"):
            s.refuse(
                key, f"there is no logger {name!r}.{did_you_mean(str(name), ['console', 'file', *TRACKERS, *NO_TRACKERS])}"
            )
    if trackers:
        s.put("tracking", trackers, by=key)
    if missing:
        s.notes[key] = (
            f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not available, so the terminal and "
            f"metrics.jsonl in the run's folder get the metrics; {', '.join(TRACKERS)} are available if installed"
        )


def keep(s: Source) -> None:
    """Set the number of checkpoints to keep."""
    key = "trainer.max_actor_ckpt_to_keep"
    s.put("train.keep_checkpoints", s.get(key, KEEP_ALL), by=key)
