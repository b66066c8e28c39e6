"""ConfigDialect: configurations with the keys of another library.

[project.entry-points."polyturn.config_dialects"]
other = "polyturn_other:DIALECT"               polyturn train --other CONFIG
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class TrainDialect(Protocol):
    """Trains from a file with another library's keys."""

    def __call__(self, path: Path, overrides: Sequence[str], *, resume: bool, dry_run: bool) -> None:
        """Translate the file and the overrides, and train; with `dry_run`, only check and show the configuration."""
        ...


class MigrateDialect(Protocol):
    """Converts a file with another library's keys to polyturn's."""

    def __call__(self, path: Path, overrides: Sequence[str], *, out: Path | None) -> None:
        """Write the configuration to `out`, or next to the file, and a table with the translation of each key."""
        ...


@dataclass(frozen=True, kw_only=True)
class ConfigDialect:
    """Support for another library's keys."""

    title: str
    """Name of the library in messages and help."""
    usual_keys: frozenset[str]
    """Keys of its files. A file with two of them that polyturn's configuration lacks is assumed to be in this dialect."""
    own_keys: frozenset[str] = frozenset()
    """Keys that only this dialect has: one of them is enough to recognise it."""
    train: TrainDialect
    migrate: MigrateDialect | None = None
