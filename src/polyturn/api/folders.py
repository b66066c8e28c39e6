"""What several commands need: opening a config, the folder of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyturn.api.console import quiet_transformers
from polyturn.build import ConfigSource, Parts
from polyturn.config.load import base_of, load_config
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError, one_line


def open_place(path: Path, overrides: Sequence[str]) -> tuple[ConfigSource, dict[str, Any]]:
    """Read a config, or that of a run's folder.

    Returns:
        It with the folder its paths start from, and as resolved data that is safe to write.
    """
    loaded = load_config(RunConfig, path, overrides)
    quiet_transformers()
    return ConfigSource(config=loaded.config, base=base_of(path)), loaded.resolved


def new_run_folder(wanted: Path) -> Path:
    """Make and return the run's folder: `wanted`, or `wanted-2` and so on, so that no earlier run is overwritten.

    Raises:
        ConfigError: it cannot be made.
    """
    folder, number = wanted, 1
    try:
        while folder.exists():
            number += 1
            folder = wanted.with_name(f"{wanted.name}-{number}")
        folder.mkdir(parents=True)
    except OSError as problem:
        raise ConfigError(
            f"the run's folder {str(folder)!r} cannot be made ({one_line(problem)}); set out=FOLDER to one that can be "
            "written, or another name=NAME"
        ) from problem
    return folder


def check_writable(wanted: Path) -> None:
    """Refuse a run's folder that could not be made, without making it.

    Raises:
        ConfigError: the first folder above it that exists cannot be written, or is no folder.
    """
    above = next(folder for folder in (wanted.absolute(), *wanted.absolute().parents) if folder.exists())
    if not above.is_dir() and above != wanted.absolute():
        why = f"{str(above)!r} is a file"
    elif not os.access(above, os.W_OK | os.X_OK):
        why = f"{str(above)!r} cannot be written by this user"
    else:
        return
    raise ConfigError(f"the run's folder {str(wanted)!r} cannot be made: {why}; set out=FOLDER to one that can be written")


def keep_tokenizer(parts: Parts, folder: Path) -> None:
    """Put the tokenizer beside the records of a run, so that its tokens can be read whatever becomes of the model."""
    parts.tokenizer.save_pretrained(folder / "tokenizer")
