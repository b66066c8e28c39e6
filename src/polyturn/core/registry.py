"""One way from a name in a config to a class: registered name, `pkg.mod:Attr`, `file.py:Attr`, or an entry point.

rewards.resolve("gsm8k")                      a registered name
rewards.resolve("my_project.rewards:score")   an attribute of an importable module (a dotted path works too)
rewards.resolve("rewards.py:score")           an attribute of a file, relative to the config that names it
rewards.resolve("length")                     an entry point of the group `polyturn.rewards`
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Generic, TypeVar

from polyturn.core import live
from polyturn.core.entry_points import OWN, load_offered, offered
from polyturn.core.errors import (
    ConfigError,
    MissingAttributeError,
    MissingModuleError,
    UnknownNameError,
    did_you_mean,
    one_line,
)
from polyturn.core.interrupts import PLUGIN_RAISES, pass_interrupt

T = TypeVar("T")
NAMESPACES = "polyturn.namespaces"
"""Entry points of libraries that polyturn can stand in for: the root name, and a function that puts that in place."""
_LOADING = threading.RLock()
"""Held while a file is imported, which several threads may ask for at once."""


class Registry(Generic[T]):
    """Names of one kind of plug-in, such as "rewards": what was registered here, and the entry points of its group."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.group = f"polyturn.{kind}"
        self._entries: dict[str, T] = {}
        self._replaced: set[str] = set()
        """Names that were registered in place of whatever has them."""

    def register(self, name: str, *, replace: bool = False) -> Callable[[T], T]:
        """Return a decorator that registers its argument under `name`; with `replace` whatever has that name gives way.

        Raises:
            ConfigError: the name is taken by something else; a file that is imported under a second name registers the same.
        """

        def add(entry: T) -> T:
            is_own = any(offer.distribution == OWN for offer in offered(self.group).get(name, ()))
            if replace:
                self._replaced.add(name)
            elif (name in self._entries or is_own) and not is_same_source(taken := self.resolve(name), entry):
                raise ConfigError(f"{self.kind}: the name {name!r} is registered already, as {taken!r}")
            self._entries[name] = entry
            return entry

        return add

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*offered(self.group), *self._entries]))

    def __contains__(self, name: str) -> bool:
        return name in self._entries or name in offered(self.group)

    def resolve(self, name: str, *, base: Path | None = None, key: str | None = None) -> T:
        """Return what `name` stands for. `base` is the folder that relative file paths start from, `key` the configuration's
        key that holds the name, for messages.

        Raises:
            UnknownNameError: nothing has that name; the message shows the nearest known ones.
            ConfigError: two distributions offer that name.
            MissingModuleError, MissingAttributeError: a path, or an entry point, that leads nowhere.
        """
        if name in self._entries:
            others = [offer.distribution for offer in offered(self.group).get(name, ()) if offer.distribution != OWN]
            if others and name not in self._replaced:
                raise ConfigError(
                    f"{key or self.kind}: {name!r} is {self._entries[name]!r}, and {' and '.join(others)} offers that name, "
                    f"too (an entry point of {self.group!r}); uninstall {others[0].split()[0]}, or give yours another name"
                )
            return self._entries[name]
        if live.is_label(name):
            given: T = live.target(name)
            return given
        if ":" in name or "." in name:
            found: T = import_attr(name, base=base)
            return found
        if name in offered(self.group):
            loaded: T = load_offered(self.group, name, where=key or self.kind)
            return loaded
        raise UnknownNameError(f"{key or self.kind}: there is no {name!r}.{did_you_mean(name, self)}")


def is_same_source(one: Any, other: Any) -> bool:
    """Return whether two values are one, or one function or class of a file that was imported under two names."""
    return one is other or (_source(one) is not None and _source(one) == _source(other))


def _source(entry: Any) -> tuple[Any, ...] | None:
    """Return where a function or class of a module is written; None for what is made while a program runs."""
    name: str = getattr(entry, "__qualname__", "<locals>")
    if "<locals>" in name:
        return None
    if isinstance(entry, FunctionType):
        return name, Path(entry.__code__.co_filename).absolute(), entry.__code__.co_firstlineno
    file = getattr(sys.modules.get(entry.__module__), "__file__", None) if isinstance(entry, type) else None
    return None if file is None else (name, Path(file).absolute())


def import_attr(path: str, *, base: Path | None = None) -> Any:
    """Import what `pkg.mod:Attr`, `pkg.mod.Attr` or `folder/file.py:Attr` names; the label of a live object is that object.

    Raises:
        MissingModuleError: the module or file cannot be found or imported.
        MissingAttributeError: the module has no such attribute.
    """
    if live.is_label(path):
        return live.target(path)
    where, colon, name = path.rpartition(":")
    if not colon:
        where, _, name = path.rpartition(".")
    if not where or not name or (not colon and name == "py"):
        raise ConfigError(f"{path!r} is not an import path; write it as 'package.module:Name' or 'file.py:Name'")
    module = _load_file(str((base or Path()).joinpath(where).resolve())) if where.endswith(".py") else _load_module(where)
    try:
        found = module
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError as problem:
        known = [n for n in vars(module) if not n.startswith("_")]
        raise MissingAttributeError(f"{where!r} has no attribute {name!r}.{did_you_mean(name, known)}") from problem
    return found


def import_file(path: Path) -> ModuleType:
    """Import a Python file as a module of its own, once however often it is named.

    Raises:
        MissingModuleError: there is no such file, or it fails when it is imported.
    """
    return _load_file(str(path.resolve()))


def import_aliased(name: str) -> ModuleType:
    """Import a module; where it belongs to a framework that is not installed, what polyturn offers in its place."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        if not offer_namespace(problem):
            raise
        return importlib.import_module(name)


def _load_module(name: str) -> ModuleType:
    try:
        return import_aliased(name)
    except PLUGIN_RAISES as problem:
        pass_interrupt(problem)
        raise MissingModuleError(
            f"the module {name!r} cannot be imported ({one_line(problem)}); check its spelling, and that its folder is "
            f"installed or on PYTHONPATH{_installed_hint(problem)}"
        ) from problem


def offer_namespace(problem: ModuleNotFoundError) -> bool:
    """Put a stand-in for the missing library in place, if a plug-in offers one; return whether it is worth a second try.

    Plug-ins that were written for another library import it. Whoever can answer for that library says so with an entry
    point of the group `polyturn.namespaces`: the root name, and a function that returns whether it now answers.
    """
    root = (problem.name or "").partition(".")[0]
    return root in offered(NAMESPACES) and install_namespace(root)


def install_namespace(root: str) -> bool:
    """Let the stand-in of a library answer for its name; return whether it does: the library itself, where it is installed,
    goes first.

    Raises:
        ConfigError: the entry point that offers the stand-in is broken.
    """
    return bool(load_offered(NAMESPACES, root, where=f"the library {root!r}")())


def _installed_hint(problem: BaseException) -> str:
    """Return what to do about a module that the installed version of a library no longer has."""
    if not isinstance(problem, ModuleNotFoundError) or "." not in (problem.name or ""):
        return ""
    root = str(problem.name).partition(".")[0]
    if root not in offered(NAMESPACES) or offer_namespace(problem):
        return ""
    return (
        f". The {root} that is installed has no such module, and polyturn answers to that name only where {root} is not "
        f"installed: name the class under polyturn, or uninstall {root}"
    )


def _load_file(path: str) -> ModuleType:
    with _LOADING:
        return _load_once(path)


@functools.cache
def _load_once(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise MissingModuleError(f"there is no file {path!r}; a path in a config is relative to the config's folder")
    digest = hashlib.sha256(path.encode()).hexdigest()[:8]
    name = f"polyturn_plugin_{Path(path).stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise MissingModuleError(f"{path!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        try:
            spec.loader.exec_module(module)
        except ModuleNotFoundError as problem:
            if not offer_namespace(problem):
                raise
            spec.loader.exec_module(module)
    except PLUGIN_RAISES as problem:
        pass_interrupt(problem)
        del sys.modules[name]
        raise MissingModuleError(f"{path!r} fails when imported{_line_of(problem, path)}: {one_line(problem)}") from problem
    return module


def _line_of(problem: BaseException, path: str) -> str:
    """Return at which line of the file it fails, where that is known; what it imports from elsewhere is not its line."""
    if isinstance(problem, SyntaxError):  # says its line itself
        return ""
    lines = [frame.lineno for frame in traceback.extract_tb(problem.__traceback__) if frame.filename == path]
    return f", at line {lines[-1]}" if lines else ""
