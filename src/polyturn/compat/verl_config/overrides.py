"""Parses an argument of a Hydra command line and applies it to a tree.

Override.parse("+data.seed=1").apply(tree, origin)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from polyturn.compat.verl_config.table import table
from polyturn.config.translate.tree import leaves
from polyturn.core.errors import ConfigError

BACKENDS = {
    "mindspeed": "MindSpeed's backend",
    "torchtitan": "TorchTitan's backend",
    "veomni": "VeOmni's backend",
    "automodel": "AutoModel's backend",
}
"""Parts of verl's trees that belong to an unsupported backend."""
BOOLEAN_SECTIONS = {"actor_rollout_ref.rollout.multi_turn": "actor_rollout_ref.rollout.multi_turn.enable"}
"""Section that may be a bare true or false -> the key that this sets."""


@dataclass(slots=True, kw_only=True)
class Override:
    """`key=value`, `+key=value`, `++key=value` or `~key`."""

    text: str
    key: str
    value: Any
    removes: bool
    is_group: bool = False
    """Whether the override selects a file of a group."""

    @classmethod
    def parse(cls, text: str) -> Override:
        """Parse one argument of the command line."""
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        head, equals, raw = text.partition("=")
        key = head.strip().lstrip("+~")
        removes = head.strip().startswith("~")
        if not key or key.startswith("-") or not (equals or removes):
            raise ConfigError(f"the override {text!r:.200} cannot be read; write key.path=value, +key=value or ~key")
        if "." not in key or "@" in key or "/" in key:
            refuse_backend(raw, what=f"the override {text!r:.200}")
        if key in BOOLEAN_SECTIONS and raw.strip().lower() in ("true", "false"):
            key, text = BOOLEAN_SECTIONS[key], f"{BOOLEAN_SECTIONS[key]}={raw}"
        try:
            parsed = OverridesParser.create().parse_override(text)
            is_sweep, value = parsed.is_sweep_override(), parsed.value()
        except (HydraException, OmegaConfBaseException, LookupError, ValueError, TypeError, RecursionError) as error:
            why = " ".join(str(error).split())
            raise ConfigError(f"the value in the override {text!r:.200} cannot be read ({why:.300}); quote it") from error
        if is_sweep:
            raise ConfigError(f"the override {text!r:.200} names several values; write key=[a,b] for a list, or quote them")
        return cls(text=text, key=key, value=value, removes=removes)

    def find_group(self, folders: Sequence[Path]) -> None:
        """Determine whether the override selects a file of a group.

        Raises:
            ConfigError: the override empties a section.
        """
        is_folder = not isinstance(self.value, Mapping) and any(os.path.isdir(f / self.key) for f in folders)
        self.is_group = "@" in self.key or "/" in self.key or is_folder
        is_section = self.is_group or (table().find(self.key) is None and table().goes_deeper(self.key))
        is_empty = not self.value and not isinstance(self.value, Mapping) and not self.removes
        if is_section and is_empty and not self.key.startswith("hydra/"):
            raise ConfigError(f"the override {self.text!r:.200} empties a whole section; set its keys, or remove it")

    def apply(self, tree: DictConfig, origin: dict[str, str]) -> None:
        """Change the tree, and record the written keys in `origin`."""
        if self.removes or not isinstance(self.value, Mapping):
            for known in [k for k in origin if k == self.key or k.startswith(f"{self.key}.")]:
                del origin[known]
        if self.removes:
            self._remove(tree)
            return
        try:
            OmegaConf.update(tree, self.key, self.value, merge=True, force_add=True)
        except (OmegaConfBaseException, AttributeError, LookupError, TypeError, ValueError) as error:
            why = " ".join(str(error).split())
            raise ConfigError(f"the override {self.text!r:.200} cannot be set in the config ({why:.200})") from error
        source = f"from the override {self.text!r}"
        origin.update({".".join((self.key, *path)): source for path, _ in leaves(self.value)})

    def _remove(self, tree: DictConfig) -> None:
        above, _, last = self.key.rpartition(".")
        section = OmegaConf.select(tree, above) if above else tree
        if isinstance(section, DictConfig) and last in section:
            if "=" in self.text and section[last] != self.value:
                raise ConfigError(
                    f"the override {self.text!r:.200} removes the key only if it has this value, but it is "
                    f"{section[last]!r:.100}; write the key without a value"
                )
            del section[last]
        elif not table().knows(self.key):
            raise ConfigError(f"the override {self.text!r}: there is nothing to remove.{table().nearest(self.key)}")


def refuse_backend(text: str, *, what: str) -> None:
    for name, backend in BACKENDS.items():
        if name in text:
            raise ConfigError(
                f"{what}: {backend} and its keys are not supported; start from ppo_trainer, use strategy fsdp, and remove "
                f"every {name} key"
            )
