"""Place: a configuration and where its relative paths start; what every other file here is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from polyturn.config.models import (
    RunConfig,
)

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, kw_only=True)
class Place:
    """A configuration, and where its relative paths start."""

    config: RunConfig
    base: Path


def folder_or_name(source: str, base: Path) -> str:
    """Return a folder relative to the config where there is one, else the name of a model on the hub."""
    local = base / source
    return str(local) if local.is_dir() else source
