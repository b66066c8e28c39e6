"""From the name in a config to an adapter.

    textarena:GuessTheNumber-v0       a shipped prefix, or an entry point of the group `polyturn.environments`
    my_package.module:Class           an `Adapter`, or an environment (reset, step, close), in a module
    folder/lake.py:Lake               the same in a file, relative to the config

The shipped adapters stand here as paths, because each imports what its package brings.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError, UnknownNameError, did_you_mean, one_line
from polyturn.core.plugin_class import CallShape, Shape, check_class
from polyturn.core.registry import import_attr
from polyturn.environments.base import Adapter
from polyturn.rollout.env import ENV, Env

adapters: dict[str, str] = {
    "gymnasium": "polyturn.environments.gymnasium:Gymnasium",
    "textarena": "polyturn.environments.textarena:TextArena",
    "reasoning_gym": "polyturn.environments.reasoning_gym:ReasoningGym",
    "gem": "polyturn.environments.gem:Gem",
    "openenv": "polyturn.environments.openenv:OpenEnv",
    "skyrl": "polyturn.environments.skyrl:Skyrl",
    "trl": "polyturn.environments.trl:Trl",
    "verifiers": "polyturn.environments.verifiers:Verifiers",
}
"""Prefix to the path of an `Adapter`."""

ADAPTER = Shape(
    what="an adapter of environments",
    needs=(("make", "make_for", "scheduler"),),
    bases=(Adapter,),
    calls={
        "make": CallShape(num=0, write="def make(self)"),
        "make_for": CallShape(num=1, write="def make_for(self, task)"),
        "tools": CallShape(num=0, write="def tools(self)"),
        "scheduler": CallShape(num=0, write="def scheduler(self)"),
        "close": CallShape(num=0, write="def close(self)"),
    },
)
"""What the class of an adapter defines."""

_GROUP = "polyturn.environments"


def find_adapter(name: str, kwargs: Mapping[str, Any] | None = None, *, base: Path | None = None) -> Adapter:
    """Return the adapter that a name stands for.

    Raises:
        UnknownNameError: there is no such prefix, or the package knows no such id; the message has the nearest.
        ConfigError: the package is missing, or it cannot be made with these arguments.
    """
    prefix, colon, id = name.partition(":")
    if not colon or not id:
        raise ConfigError(
            f"env {name!r} is no name of an environment; write 'prefix:id', for instance 'textarena:GuessTheNumber-v0', or "
            "'package.module:Class' or 'file.py:Class' for one of your own"
        )
    if "." in prefix or "/" in prefix:
        return _own(name, import_attr(name, base=base), kwargs or {}, base)
    wanted = prefix.replace("-", "_")
    points = entry_points(group=_GROUP)
    if wanted in adapters:
        made: Any = import_attr(adapters[wanted])
    elif wanted in points.names:
        made = points[wanted].load()
    else:
        known = [*adapters, *points.names]
        raise UnknownNameError(f"env {name!r}: there is no prefix {prefix!r}.{did_you_mean(wanted, known)}")
    if not isinstance(made, type) or not issubclass(made, Adapter):
        raise ConfigError(
            f"env {name!r}: the prefix {prefix!r} leads to {made!r:.100}; it must be a class that inherits Adapter"
        )
    return made(name, id, kwargs or {}, base=base)


class _Own(Adapter):
    """A class of the user's with reset, step and close."""

    def __init__(self, name: str, make: Any, kwargs: Mapping[str, Any], *, base: Path | None) -> None:
        super().__init__(name, name.partition(":")[2], kwargs, base=base)
        try:
            inspect.signature(make).bind(**kwargs)
        except TypeError as problem:
            raise ConfigError(
                f"env {name!r} does not take env.kwargs {dict(kwargs)!r:.200}: {one_line(problem)}"
            ) from problem
        self._make = make

    def make(self) -> Env:
        made = self._make(**self.kwargs)
        if not isinstance(made, Env):
            raise ConfigError(f"env {self.name!r} makes {made!r:.100}; it must make objects with reset, step and close")
        return made


def _own(name: str, found: Any, kwargs: Mapping[str, Any], base: Path | None) -> Adapter:
    if isinstance(found, type):
        check_class(found, ADAPTER if issubclass(found, Adapter) else ENV, where=f"env {name!r}")
    if isinstance(found, type) and issubclass(found, Adapter):
        return found(name, name.partition(":")[2], kwargs, base=base)
    if not callable(found):
        raise ConfigError(
            f"env {name!r} is {found!r:.100}; name an Adapter, or a class with reset(seed), step(action) and close()"
        )
    return _Own(name, found, kwargs, base=base)
