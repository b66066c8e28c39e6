"""ConfigDialect: the keys of another library, in which a run can be described.

[project.entry-points."polyturn.config_dialects"]
other = "polyturn_other:DIALECT"               polyturn train --other CONFIG
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class TrainDialect(Protocol):
    """Trains what a file describes in other keys."""

    def __call__(self, path: Path, overrides: Sequence[str], *, resume: bool, dry_run: bool) -> None:
        """Translate the file and the overrides, and train; with `dry_run` check everything, show it, and stop."""
        ...


class MigrateDialect(Protocol):
    """Writes what a file describes in other keys as a configuration of polyturn."""

    def __call__(self, path: Path, overrides: Sequence[str], *, out: Path | None) -> None:
        """Write the configuration to `out`, or beside the file, and a table of what became of each key."""
        ...


@dataclass(frozen=True, kw_only=True)
class ConfigDialect:
    """A way to describe a run in the keys of another library."""

    title: str
    """Whose keys they are, for messages and help."""
    usual_keys: frozenset[str]
    """Keys of its files; one with two of them, of which polyturn's own have one not, is taken to be in this dialect."""
    own_keys: frozenset[str] = frozenset()
    """Keys of which one is enough, because no configuration of polyturn has them by mistake."""
    train: TrainDialect
    migrate: MigrateDialect | None = None
