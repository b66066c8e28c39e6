"""The registries of plug-ins: dictionaries in which two plug-ins cannot use the same name.

    multi_turns["mine"] = Mine        a class of `multi_turn.RolloutScheduler`
    orms["mine"] = Mine               a class of `rewards.ORM`, or a function

A plug-in may replace a shipped entry; replacing another plug-in's entry is an error.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError, UnknownNameError, did_you_mean
from polyturn.infra.plugin_shape import Shape, check_class


class PluginDict(dict[str, Any]):
    """Name -> class, for one kind of plug-in."""

    def __init__(self, kind: str, shipped: dict[str, Any] | None = None, *, shape: Shape | None = None) -> None:
        """Create a registry with the shipped entries.

        Args:
            kind: The registry's name in messages.
            shipped: The shipped entries.
            shape: The methods that a class needs. They are checked when a run uses the class, because a file may register
                classes that the run never uses. None if the loader of configs checks them.
        """
        super().__init__(shipped or {})
        self.kind = kind
        self._shape = shape

    def __setitem__(self, name: str, entry: Any) -> None:
        old = self.get(name)
        if old is not None and old is not entry and not _is_shipped(old) and _file(old) != _file(entry):
            raise ConfigError(
                f"{self.kind}: two plug-ins register the name {name!r}: {_home(old)} ({_name(old)}) and {_home(entry)} "
                f"({_name(entry)}); rename one of them"
            )
        super().__setitem__(name, entry)

    # The methods of `dict` would not call `__setitem__`.
    update = MutableMapping.update
    setdefault = MutableMapping.setdefault

    def __ior__(self, entries: Any) -> PluginDict:  # type: ignore[override, misc]
        self.update(entries)
        return self

    def find(self, name: str) -> Any:
        """Return the plug-in with a name.

        Raises:
            UnknownNameError: the name is not registered.
            ConfigError: the registered class lacks a method, or misspells one.
        """
        if name not in self:
            raise UnknownNameError(
                f"{self.kind}: there is no {name!r}.{did_you_mean(name, self)} To add {name!r}, write "
                f"{self.kind}[{name!r}] = YourClass in a Python file, and name the file in --external_plugins (in a "
                "configuration: under plugins)"
            )
        entry = self[name]
        if self._shape is not None and isinstance(entry, type):
            check_class(entry, self._shape, where=f"{self.kind}[{name!r}]")
        return entry


def _home(entry: Any) -> str:
    return str(entry.__module__ if isinstance(entry, type) or callable(entry) else type(entry).__module__)


def _file(entry: Any) -> str:
    """Return the file that defines an entry. Files are compared, because one file may be imported under two names."""
    home = _home(entry)
    module = sys.modules.get(home)
    return home if module is None or module.__file__ is None else str(Path(module.__file__).resolve())


def _name(entry: Any) -> str:
    return entry.__name__ if isinstance(entry, type) else type(entry).__name__


def _is_shipped(entry: Any) -> bool:
    return _home(entry).partition(".")[0] == "polyturn"
