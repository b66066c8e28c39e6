"""Open configurations and choose the folders of runs, for several commands."""

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

ANOTHER_FOLDER = "set out=FOLDER to a writable one, or another name=NAME"
"""Advice if a run's folder cannot be made."""


def open_source(
    path: Path, overrides: Sequence[str], *, resume: bool | Literal["auto"] | None = None
) -> tuple[ConfigSource, dict[str, Any]]:
    """Load a configuration file, or the config.yaml in a run's folder, and return it with its values for `write_resolved`.

    `resume` is whether training resumes; None for commands without training.
    """
    loaded = load_config(RunConfig, path, overrides)
    if resume is not None:
        loaded = with_step_size(loaded, resume=resume)
    quiet_transformers()
    return ConfigSource(config=loaded.config, base=base_of(path)), loaded.resolved


def new_run_folder(wanted: Path) -> Path:
    """Make and return the run's folder: `wanted`, or `wanted-2` and so on if it exists.

    Raises:
        ConfigError: the folder cannot be made.
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
    """Return the last of the folders `folder`-2, `folder`-3, … that exist without a gap; None if there is none."""
    later = list(itertools.takewhile(Path.is_dir, itertools.islice(_numbered(folder), 1, None)))
    return later[-1] if later else None


def _numbered(wanted: Path) -> Iterator[Path]:
    yield wanted
    for number in itertools.count(2):
        yield wanted.with_name(f"{wanted.name}-{number}")


def name_of(folder: Path, out: str) -> str:
    """Return the setting `name` of the run in `folder`: its path relative to `out`, including its number if it has one."""
    return os.path.relpath(folder, out)


def keep_tokenizer(parts: Parts, folder: Path) -> None:
    """Save the tokenizer in a run's folder, so that its tokens can be read without the model.

    Raises:
        ConfigError: the tokenizer cannot be written, for instance on a full disk.
    """
    try:
        parts.tokenizer.save_pretrained(folder / "tokenizer")
    except Exception as problem:  # the tokenizer library raises bare exceptions
        raise cannot_be_made(folder, problem, instead=ANOTHER_FOLDER) from problem
