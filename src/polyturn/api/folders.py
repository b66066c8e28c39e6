"""What several commands need: opening a config, the folder of a run."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from polyturn.api.console import quiet_transformers
from polyturn.build import ConfigSource, Parts
from polyturn.config.load import base_of, load_config
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError
from polyturn.infra.writable import cannot_be_made

logger = logging.getLogger(__name__)

ANOTHER_FOLDER = "set out=FOLDER to one that can be, or another name=NAME"
"""What to do where a run's folder cannot be made."""
_LOCK = ".lock"
"""The file in a run's folder that whoever trains into it has locked; it stays, with who that was last."""


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
    for number in itertools.count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except (OSError, ValueError) as problem:
            if not (isinstance(problem, FileExistsError) and os.path.lexists(folder)):
                raise cannot_be_made(folder, problem, instead=ANOTHER_FOLDER) from problem
    raise AssertionError("numbers do not end")


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Keep every other process out of a run's folder meanwhile; the kernel gives it back when this one ends or is killed.

    Where the file system has no locks that is said in a line, and nobody is kept out.

    Raises:
        ConfigError: another process trains into it.
    """
    with contextlib.ExitStack() as opened:
        try:
            file = opened.enter_context((folder / _LOCK).open("a+"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        except BlockingIOError as problem:
            file.seek(0)
            raise ConfigError(
                f"{file.read() or 'another process'} trains into {folder} at this moment; wait for its end, or start a "
                "run of another name (name=NAME)"
            ) from problem
        except OSError as problem:
            logger.warning(
                "%s cannot be locked (%s), so nothing keeps a second process from training into it", folder, problem
            )
        yield


def keep_tokenizer(parts: Parts, folder: Path) -> None:
    """Put the tokenizer beside the records of a run, so that its tokens can be read whatever becomes of the model.

    Raises:
        ConfigError: it cannot be written, for instance on a full disk.
    """
    try:
        parts.tokenizer.save_pretrained(folder / "tokenizer")
    except Exception as problem:  # the library that writes it raises no other class
        raise cannot_be_made(folder, problem, instead=ANOTHER_FOLDER) from problem
