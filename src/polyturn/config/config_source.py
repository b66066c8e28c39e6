"""ConfigSource: a configuration and where its relative paths start; what every other file here is given."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.config.models import RunConfig
from polyturn.config.sources import leaves
from polyturn.core.errors import CheckpointError, ConfigError, did_you_mean
from polyturn.core.plugins import register_again, registered_by_program
from polyturn.models import PACKAGED, packaged

if TYPE_CHECKING:
    from polyturn.environments.base import Adapter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ConfigSource:
    """A configuration, and where its relative paths start.

    Pickled for another process of the run, it brings along what the program registered under the names that it uses.
    """

    config: RunConfig
    base: Path
    is_plan: bool = False
    """Nothing will be sampled or trained: the weights of a large model are not read."""
    obstacles: list[str] = field(default_factory=list, compare=False, repr=False)
    """Of a plan: why the run would not start on this machine."""
    reads_parts: bool = False
    """This is a rank, which reads its part of a model's files once the model is in shards."""
    adapters: dict[str, Adapter] = field(default_factory=dict, compare=False, repr=False)
    """The environments that were made so far, by name: what gives tasks, tools and a scheduler is one object. A copy in
    another process makes its own."""

    def __getstate__(self) -> dict[str, Any]:
        named = {value for _, value in leaves(self.config.model_dump(), ()) if isinstance(value, str)}
        return {**self.__dict__, "adapters": {}, "registered": registered_by_program(named)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        register_again(state.pop("registered"))
        self.__dict__.update(state)


_WHERE = "name a model's folder, from the config's folder on, a model on the hub as owner/name, or smollm2"


_FILES = (
    "config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json",
)  # fmt: skip
"""A folder of a model or a tokenizer has one of these."""


def check_model_name(source: str, base: Path) -> None:
    """Check that a model's name can lead to a model, without fetching anything.

    Args:
        source: A folder, a model that the package index carries, or a name on the hub.
        base: The folder that relative paths start from.

    Raises:
        ConfigError: it can only be a folder and there is none, or the folder holds no model.
    """
    local = base / Path(source).expanduser()
    if local.is_dir():
        if not _holds_model(local):
            inner = [str(f) for f in sorted(local.iterdir()) if f.is_dir() and _holds_model(f)][:3]
            hint = f"did you mean {' or '.join(map(repr, inner))}?" if inner else _WHERE
            raise ConfigError(f"the folder {str(local)!r} holds no model, because it has no config.json; {hint}")
    elif source not in PACKAGED and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        beside = [f.name for f in local.parent.iterdir() if f.is_dir()] if local.parent.is_dir() else []
        hint = did_you_mean(local.name, beside) if beside else ""
        raise ConfigError(f"there is no folder {source!r}, at {str(local.resolve())!r}; {_WHERE}.{hint}")


def _holds_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _FILES)


def folder_or_name(source: str, base: Path) -> str:
    """Return the folder that a model's name means, else the name of a model on the hub.

    A folder relative to the config comes first, then a model that the package index carries (`smollm2`), which is fetched
    once, then the hub.

    Raises:
        ConfigError: it can only be a folder and there is none, the folder holds no model, or the model of the package index
            cannot be had.
    """
    check_model_name(source, base)
    # A folder wins over a name on the hub, so that what lies beside a config is never fetched.
    local = base / Path(source).expanduser()
    if local.is_dir():
        return str(local)
    return str(packaged(source)) if source in PACKAGED else source


def model_folder(path: Path | None) -> Path | None:
    """Return the Hugging Face folder that a checkpoint's name means: a model's, a checkpoint's, or a run's latest.

    Raises:
        CheckpointError: there is no model there.
    """
    if path is None:
        return None
    # The newest first; one that was killed before its export has no model, and the one before it stands in.
    steps = sorted((*path.glob("step-*"), *path.glob("checkpoints/step-*")), reverse=True)
    for candidate in (path, *([path / "model"] if _is_checkpoint(path) else []), *(step / "model" for step in steps)):
        if (candidate / "config.json").is_file() or (candidate / "adapter_config.json").is_file():
            if candidate.parent in steps[1:]:
                logger.warning("there is no model in %s; taking the older one in %s", steps[0], candidate.parent)
            return candidate
    inner = [str(f) for f in sorted(path.glob("*")) if f.is_dir() and _holds_model(f)][:3]
    hint = (
        f"did you mean {' or '.join(map(repr, inner))}?"
        if inner
        else "name a folder with config.json, a checkpoint or a run"
    )
    raise CheckpointError(f"there is no model in {path}; {hint}")


def _is_checkpoint(folder: Path) -> bool:
    return folder.name.startswith("step-") or any((folder / name).exists() for name in ("state.pt", "policy"))
