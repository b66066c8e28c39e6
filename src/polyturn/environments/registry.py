"""Finds the adapter for the name of an environment in a configuration.

    textarena:GuessTheNumber-v0       a prefix: an entry point of the group `polyturn.environments`
    my_package.module:Class           an `Adapter`, or an environment (reset, step, close), in a module
    folder/lake.py:Lake               the same in a file, relative to the config

An adapter imports its package, so an adapter is imported only when a configuration names its prefix.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError, UnknownNameError, did_you_mean, one_line
from polyturn.environments.base import Adapter
from polyturn.infra.live import LiveObject, NameOrObject
from polyturn.infra.plugin_shape import CallShape, Shape, check_class
from polyturn.infra.plugins import Registry, import_attr, wrong_kind
from polyturn.rollout.env import ENV, Env

adapters: Registry[type[Adapter]] = Registry("environments")
"""Prefix -> subclass of `Adapter`."""

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
"""The signatures of an adapter's methods; its class needs `make`, `make_for` or `scheduler`."""


def find_adapter(name: NameOrObject, kwargs: Mapping[str, Any] | None = None, *, base: Path | None = None) -> Adapter:
    """Return the adapter for the name of an environment.

    Raises:
        UnknownNameError: the prefix or the id is unknown; the message has the closest known one.
        ConfigError: the package is missing, or an environment cannot be made with these arguments.
    """
    if isinstance(name, LiveObject):
        return _own(name, name.target, kwargs or {}, base)
    prefix, colon, id = name.partition(":")
    if not colon or not id:
        raise ConfigError(
            f"env {name!r} is not the name of an environment; write 'prefix:id', for instance "
            "'textarena:GuessTheNumber-v0', or 'package.module:Class' or 'file.py:Class' for your own class"
        )
    if "." in prefix or "/" in prefix:
        return _own(name, import_attr(name, base=base, key="env"), kwargs or {}, base)
    wanted = prefix.replace("-", "_")
    if wanted not in adapters:
        raise UnknownNameError(f"env {name!r}: there is no prefix {prefix!r}.{did_you_mean(wanted, adapters)}")
    adapter: Any = adapters.resolve(wanted, key=f"env {name!r}")
    if not isinstance(adapter, type) or not issubclass(adapter, Adapter):
        raise wrong_kind(adapters.group, wanted, adapter, where=f"env {name!r}", needs="a class that inherits Adapter")
    return adapter(name, id, kwargs or {}, base=base)


class _Own(Adapter):
    """Makes objects of a user's class with reset, step and close."""

    def __init__(self, name: NameOrObject, make: Any, kwargs: Mapping[str, Any], *, base: Path | None) -> None:
        super().__init__(str(name), _id(name), kwargs, base=base)
        try:
            inspect.signature(make).bind(**kwargs)
        except TypeError as problem:
            raise ConfigError(
                f"env {name!r} does not take env.kwargs {dict(kwargs)!r:.200}: {one_line(problem)}"
            ) from problem
        self._make = make

    def make(self) -> Env:
        env = self._make(**self.kwargs)
        if not isinstance(env, Env):
            raise ConfigError(f"env {self.name!r} made {env!r:.100}; it must make objects with reset, step and close")
        return env


def _id(name: NameOrObject) -> str:
    return (name if isinstance(name, str) else name.name).partition(":")[2]


def _own(name: NameOrObject, cls: Any, kwargs: Mapping[str, Any], base: Path | None) -> Adapter:
    if isinstance(cls, type):
        check_class(cls, ADAPTER if issubclass(cls, Adapter) else ENV, where=f"env {name!r}")
    if isinstance(cls, type) and issubclass(cls, Adapter):
        return cls(str(name), _id(name), kwargs, base=base)
    if not callable(cls):
        kind = type(cls).__name__
        raise ConfigError(
            f"env {name!r} is an object of {kind}; pass the class {kind}, so that each episode gets its own object"
        )
    return _Own(name, cls, kwargs, base=base)
