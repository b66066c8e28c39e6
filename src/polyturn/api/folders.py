"""Shared by several commands: opening a config, the folder of a run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from polyturn.api.console import quiet_transformers
from polyturn.api.step_size import with_step_size
from polyturn.build import ConfigSource, Parts
from polyturn.config.load import base_of, load_config
from polyturn.config.models import RunConfig
from polyturn.infra.writable import cannot_be_made

ANOTHER_FOLDER = "set out=FOLDER to one that can be, or another name=NAME"
"""The advice where a run's folder cannot be made."""


def open_source(
    path: Path, overrides: Sequence[str], *, resume: bool | Literal["auto"] | None = None
) -> tuple[ConfigSource, dict[str, Any]]:
    """Read a config, or that of a run's folder.

    Args:
        path: The config, or the folder.
        overrides: Changes of it, `section.key=value`.
        resume: Whether the run that it trains goes on; None where nothing is trained.

    Returns:
        It with the folder its paths start from, and as resolved data that is safe to write.
    """
    loaded = load_config(RunConfig, path, overrides)
    if resume is not None:
        loaded = with_step_size(loaded, resume=resume)
    quiet_transformers()
    return ConfigSource(config=loaded.config, base=base_of(path)), loaded.resolved


def new_run_folder(wanted: Path) -> Path:
    """Make and return the run's folder: `wanted`, or `wanted-2` and so on, so that no earlier run is overwritten.

    Raises:
        ConfigError: it cannot be made.
    """
    for folder in _numbered(wanted):
        try:
            folder.mkdir(parents=True)
            return folder
        except (OSError, ValueError) as problem:
            if not (isinstance(problem, FileExistsError) and os.path.lexists(folder)):
                raise cannot_be_made(folder, problem, instead=ANOTHER_FOLDER) from problem
    raise AssertionError("numbers do not end")


def later_run(folder: Path) -> Path | None:
    """Return the last of the runs that were given the same name after `folder`; None without any."""
    later = list(itertools.takewhile(Path.is_dir, itertools.islice(_numbered(folder), 1, None)))
    return later[-1] if later else None


def _numbered(wanted: Path) -> Iterator[Path]:
    yield wanted
    for number in itertools.count(2):
        yield wanted.with_name(f"{wanted.name}-{number}")


def name_of(folder: Path, out: str) -> str:
    """Return the name that leads to a run's folder: the one that was asked for, or with its number."""
    return os.path.relpath(folder, out)


def keep_tokenizer(parts: Parts, folder: Path) -> None:
    """Put the tokenizer beside the records of a run, so that its tokens can be read whatever becomes of the model.

    Raises:
        ConfigError: it cannot be written, for instance on a full disk.
    """
    try:
        parts.tokenizer.save_pretrained(folder / "tokenizer")
    except Exception as problem:  # the library that writes it raises no other class
        raise cannot_be_made(folder, problem, instead=ANOTHER_FOLDER) from problem
