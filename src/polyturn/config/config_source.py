"""ConfigSource: a configuration with the folder of its relative paths; and the look-up of the models that it names."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.config.models import RunConfig
from polyturn.config.sources import leaves
from polyturn.core.errors import CheckpointError, ConfigError, did_you_mean
from polyturn.infra.plugins import register_again, registered_by_program
from polyturn.models import PACKAGED, packaged

if TYPE_CHECKING:
    from polyturn.environments.base import Adapter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ConfigSource:
    """A configuration, and the folder that its relative paths start at.

    When a configuration is pickled for another process, the plug-ins that it names and that the program registered are
    included.
    """

    config: RunConfig
    base: Path
    is_plan: bool = False
    """Whether nothing will be sampled or trained. The weights of a large model are then not read."""
    trains: bool = True
    """Whether the model is trained, so that servers are sent new weights."""
    obstacles: list[str] = field(default_factory=list, compare=False, repr=False)
    """In a plan, reasons why the run would not start on this machine."""
    reads_parts: bool = False
    """Whether this process makes the model without weights, because each rank reads its part of them after sharding."""
    adapters: dict[str, Adapter] = field(default_factory=dict, compare=False, repr=False)
    """Name -> environment adapter. Tasks, tools and scheduler share it. A copy in another process starts empty."""

    def __getstate__(self) -> dict[str, Any]:
        named = {value for _, value in leaves(self.config.model_dump(), ()) if isinstance(value, str)}
        return {**self.__dict__, "adapters": {}, "registered": registered_by_program(named)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        register_again(state.pop("registered"))
        self.__dict__.update(state)


_WHERE = "give a model's folder, relative to the config's folder, a model on the hub as owner/name, or smollm2"


_FILES = (
    "config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json",
)  # fmt: skip
"""Files that show that a folder contains a model or a tokenizer."""


def check_model_name(source: str, base: Path) -> None:
    """Raise for a model's name that cannot be valid; nothing is downloaded.

    Raises:
        ConfigError: the name can only be a folder that does not exist, or the folder has no model.
    """
    local = base / os.path.expanduser(source)
    if os.path.isdir(local):  # Path.is_dir raises for a name that is too long
        if not _holds_model(local):
            inner = [str(f) for f in sorted(local.iterdir()) if f.is_dir() and _holds_model(f)][:3]
            hint = f"did you mean {' or '.join(map(repr, inner))}?" if inner else _WHERE
            raise ConfigError(f"the folder {str(local)!r} has no config.json, so it is not a model; {hint}")
    elif source not in PACKAGED and (source.startswith((".", "/", "~")) or source.count("/") > 1 or os.path.isfile(local)):
        beside = [f.name for f in local.parent.iterdir() if f.is_dir()] if local.parent.is_dir() else []
        hint = did_you_mean(local.name, beside) if beside else ""
        raise ConfigError(f"there is no folder {source!r}, at {str(local.resolve())!r}; {_WHERE}.{hint}")


def _holds_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _FILES)


def folder_or_name(source: str, base: Path) -> str:
    """Return the folder for a model's name, or the name if it is on the hub.

    A folder relative to the config comes first, then a model on the package index (`smollm2`), which is downloaded once,
    then the hub.

    Raises:
        ConfigError: the name can only be a folder that does not exist, the folder has no model, or the download failed.
    """
    check_model_name(source, base)
    # A folder takes precedence over the hub, so that a folder next to a config is never downloaded.
    local = base / os.path.expanduser(source)
    if os.path.isdir(local):
        return str(local)
    if source not in PACKAGED:
        return source
    from polyturn.tracking.console import Progress

    with Progress(f"prepare {source}"):
        return str(packaged(source))


def model_folder(path: Path | None) -> Path | None:
    """Return the folder of a Hugging Face model for a path to a model, a checkpoint, or a run (its latest checkpoint).

    Raises:
        CheckpointError: the path has no model.
    """
    if path is None:
        return None
    # Newest first. If the run was killed before a checkpoint's export, use the previous checkpoint.
    steps = sorted((*path.glob("step-*"), *path.glob("checkpoints/step-*")), reverse=True)
    for candidate in (path, *([path / "model"] if _is_checkpoint(path) else []), *(step / "model" for step in steps)):
        if _has_weights(candidate):
            if candidate.parent in steps[1:]:
                logger.warning("there is no model in %s; using the older one in %s", steps[0], candidate.parent)
            return candidate
    inner = [str(f) for f in sorted(path.glob("*")) if _has_weights(f)][:3]
    hint = "give a folder with config.json, a checkpoint or a run"
    if steps or _is_checkpoint(path):
        hint = "with its train.export, the run writes the model only at its end; resume the run"
    elif inner:
        hint = f"did you mean {' or '.join(map(repr, inner))}?"
    raise CheckpointError(f"there is no model in {path}; {hint}")


def _has_weights(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()


def _is_checkpoint(folder: Path) -> bool:
    return folder.name.startswith("step-") or any((folder / name).exists() for name in ("state.pt", "policy"))
