"""What several commands need: opening a config, the folder of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyturn.build import Parts, Place
from polyturn.cli.console import quiet_transformers
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig


def open_place(path: Path, overrides: Sequence[str]) -> tuple[Place, dict[str, Any]]:
    """Read a config; return it with the folder its paths start from, and as resolved data that is safe to write."""
    quiet_transformers()
    loaded = load_config(RunConfig, path, overrides)
    return Place(config=loaded.config, base=path.parent.resolve()), loaded.resolved


def new_run_folder(wanted: Path) -> Path:
    """Make and return the run's folder: `wanted`, or `wanted-2` and so on, so that no earlier run is overwritten."""
    folder, number = wanted, 1
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    folder.mkdir(parents=True)
    return folder


def keep_tokenizer(parts: Parts, folder: Path) -> None:
    """Put the tokenizer beside the records of a run, so that its tokens can be read whatever becomes of the model."""
    parts.tokenizer.save_pretrained(folder / "tokenizer")
