"""Plug-ins: resolves a name in a configuration to a class, a function or a module.

    ppo_clip                   an entry point of the group `polyturn.losses`, or a name that this process registered
    my_project.losses:mine     an attribute of an importable module (a dotted path works, too)
    losses.py:mine             an attribute of a file, relative to the configuration that names it
    plugins: [mine.py]         a file that registers what it defines when it is imported

Another distribution offers its parts in its pyproject.toml, and `algorithm.loss: mine` works without any import:

    [project.entry-points."polyturn.losses"]
    mine = "my_package.losses:mine"

Groups: `polyturn.engines`, `.estimators`, `.losses`, `.environments`, `.trackers`, `.config_dialects`, `.namespaces`, and
one for every other `Registry`. A plug-in is imported when a configuration names it, not before.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
import threading
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Generic, TypeVar

from polyturn.core.code_origin import is_an_authors
from polyturn.core.errors import (
    PLUGIN_RAISES,
    ConfigError,
    MissingAttributeError,
    MissingModuleError,
    PolyturnError,
    UnknownNameError,
    did_you_mean,
    one_line,
    raised_at,
)
from polyturn.infra.live import LiveObject, NameOrObject

logger = logging.getLogger(__name__)

T = TypeVar("T")
OWN = "polyturn"
"""The name of polyturn's distribution."""
NAMESPACES = "polyturn.namespaces"
"""Group of entry points for libraries that polyturn can stand in for: root module -> function that installs the stand-in."""
_PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
_REGISTRIES: dict[str, Registry[Any]] = {}
"""Kind -> its registry."""
_RECEIVED: dict[str, dict[str, Any]] = {}
"""Kind -> name -> object that the program registered in another process of the run."""
_LOADING = threading.RLock()
"""Held while a file is imported, because several threads may import the same file."""


class Registry(Generic[T]):
    """The plug-ins of one kind, such as "rewards", by name: registered in this process, or entry points of the group."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.group = f"polyturn.{kind}"
        self._entries: dict[str, T] = {**_RECEIVED.get(kind, {})}
        self._replaced: set[str] = set(self._entries)
        """Names that were registered in place of others."""
        _REGISTRIES[kind] = self

    def register(self, name: str, *, replace: bool = False) -> Callable[[T], T]:
        """Return a decorator that registers its argument under `name`; `replace` allows a name that is already taken.

        Raises:
            ConfigError: the name belongs to another object. Importing the same file under a second name is not a conflict.
        """

        def add(entry: T) -> T:
            is_own = any(distribution_of(point) == OWN for point in offered(self.group).get(name, ()))
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

    def resolve(self, name: NameOrObject, *, base: Path | None = None, key: str | None = None) -> T:
        """Return the object with this name.

        Args:
            name: A name, an import path, or a live object, whose target is returned.
            base: The folder that relative file paths start from.
            key: The configuration key that holds the name, for messages.

        Raises:
            UnknownNameError: there is no such name; the message shows the closest known names.
            ConfigError: two distributions offer that name.
            MissingModuleError, MissingAttributeError: the target of a path or an entry point does not exist.
        """
        target: T
        if isinstance(name, LiveObject):
            target = name.target
            return target
        where = key or self.kind
        if name in self._entries:
            others = [d for d in map(distribution_of, offered(self.group).get(name, ())) if d != OWN]
            if others and name not in self._replaced:
                raise ConfigError(
                    f"{where}: {name!r} is {self._entries[name]!r}, and {' and '.join(others)} offers that name, too (an "
                    f"entry point of {self.group!r}); uninstall {others[0].split()[0]}, or give yours another name"
                )
            return self._entries[name]
        if ":" in name or "." in name:
            target = import_attr(name, base=base, key=where)
        elif name in offered(self.group):
            target = load_offered(self.group, name, where=where)
        else:
            raise UnknownNameError(f"{where}: there is no {name!r}.{did_you_mean(name, self)}")
        return target


def registered_by_program(names: Set[str]) -> dict[str, dict[str, Any]]:
    """Return kind -> name -> object for the `names` that code outside polyturn registered, to pass to another process."""
    entries = {
        kind: {name: entry for name, entry in registry._entries.items() if name in names and not _is_own(entry)}
        for kind, registry in _REGISTRIES.items()
    }
    return {kind: named for kind, named in entries.items() if named}


def register_again(entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Register the result of another process's `registered_by_program`; names known here keep their object."""
    for kind, named in entries.items():
        _RECEIVED.setdefault(kind, {}).update(named)
        if (registry := _REGISTRIES.get(kind)) is not None:  # otherwise importing its module creates it, with `_RECEIVED`
            registry._replaced |= named.keys() - registry._entries.keys()
            registry._entries = {**named, **registry._entries}


def _is_own(entry: Any) -> bool:
    return str(getattr(entry, "__module__", type(entry).__module__)).partition(".")[0] == OWN


def is_same_source(one: Any, other: Any) -> bool:
    """Return whether two values are identical, or the same function or class of a file imported under two names."""
    if one is other:
        return True
    return not are_of_loop(one, other) and _source(one) is not None and _source(one) == _source(other)


def are_of_loop(one: Any, other: Any) -> bool:
    """Return whether one statement defined both functions, or both classes, as in a loop.

    Such functions share their code object, and so do the methods of such classes. Two imports of a file share none.
    """
    return not _codes(one).isdisjoint(_codes(other))


def _codes(entry: Any) -> set[int]:
    """Return the identities of the code objects of a function, or of a class's own methods."""
    functions = vars(entry).values() if isinstance(entry, type) else [entry]
    return {id(f.__code__) for f in functions if isinstance(f, FunctionType) and f.__module__ == entry.__module__}


def _source(entry: Any) -> tuple[Any, ...] | None:
    """Return the name and file of a function or class; None if it was created inside a function or has no file."""
    name: str = getattr(entry, "__qualname__", "<locals>")
    if "<locals>" in name:
        return None
    if isinstance(entry, FunctionType):
        return name, Path(entry.__code__.co_filename).absolute(), entry.__code__.co_firstlineno
    file = getattr(sys.modules.get(entry.__module__), "__file__", None) if isinstance(entry, type) else None
    return None if file is None else (name, Path(file).absolute())


# Entry points.


def offered(group: str) -> Mapping[str, Sequence[EntryPoint]]:
    """Return the entry points of a group such as "polyturn.losses", by name; those of polyturn come first."""
    return _entry_points(tuple(sys.path)).get(group, {})


def distribution_of(point: EntryPoint) -> str:
    """Return the distribution that offers an entry point: "some-package 1.0", or `OWN`."""
    return OWN if point.dist is None or point.dist.name == OWN else f"{point.dist.name} {point.dist.version}"


def load_offered(group: str, name: str, *, where: str) -> Any:
    """Import the entry point `name`, which must be in `offered(group)`; error messages begin with `where`.

    Raises:
        ConfigError: several distributions offer the name.
        MissingModuleError, MissingAttributeError: its module cannot be imported, or lacks the attribute.
    """
    point, *others = offered(group)[name]
    if others:
        names = " and ".join(map(distribution_of, (point, *others)))
        raise ConfigError(
            f"{where}: {name!r} is offered by {names} (entry points of {group!r}); uninstall all but one of them"
        )
    try:
        return point.load()
    except PLUGIN_RAISES as problem:
        package = distribution_of(point).split()[0]
        reason, cure = f"cannot be imported ({one_line(problem)})", f"repair or uninstall {package}"
        if isinstance(problem, ModuleNotFoundError):
            reason = f"needs {problem.name}, which is not installed"
            cure = f"install that, or uninstall {package}" if package != OWN else "install it"
            if package == OWN and name in _own()[1]:
                cure = f"run: pip install 'polyturn[{name}]'"
        kind = MissingAttributeError if isinstance(problem, AttributeError) else MissingModuleError
        raise kind(f"{_in_words(where, name, point)} {reason}; {cure}") from problem


def load_each(group: str, kind: type[T]) -> Iterator[tuple[str, T]]:
    """Yield the name and value of each entry point of a group whose value is a `kind`; broken ones only log a warning."""
    for name in offered(group):
        try:
            targets = load_offered(group, name, where=group)
        except ConfigError as problem:
            _warn(str(problem))
            continue
        if isinstance(targets, kind):
            yield name, targets


def wrong_kind(group: str, name: NameOrObject, target: object, *, where: str, needs: str) -> ConfigError:
    """Return the error for an entry point whose value is not of the kind that its group needs."""
    points = offered(group).get(str(name))
    what = _in_words(where, str(name), points[0]) if points else f"{where}: {name!r}"
    return ConfigError(f"{what} is {target!r:.100}; it must be {needs}")


@functools.cache
def _warn(problem: str) -> None:
    logger.warning("%s", problem)


def _in_words(where: str, name: str, point: EntryPoint) -> str:
    return f"{where}: {name!r}, which {distribution_of(point)} offers as {point.value!r},"


@functools.lru_cache(maxsize=4)
def _entry_points(path: tuple[str, ...]) -> dict[str, dict[str, list[EntryPoint]]]:
    """Return group -> name -> entry points, of all distributions under `path` (which is `sys.path`)."""
    points, seen = [*_own()[0]], {OWN}
    for one in distributions():
        plugin_points = [point for point in one.entry_points if point.group.startswith("polyturn.")]
        if plugin_points and (name := (one.name or "").lower()) not in seen:
            seen.add(name)  # if a distribution is on the path twice, Python imports the first
            points += plugin_points
    groups: dict[str, dict[str, list[EntryPoint]]] = {}
    for point in points:
        groups.setdefault(point.group, {}).setdefault(point.name, []).append(point)
    return groups


@functools.cache
def _own() -> tuple[Sequence[EntryPoint], Sequence[str]]:
    """Return the entry points and extras of polyturn. A checkout reads pyproject.toml: the metadata may be older."""
    if _PYPROJECT.is_file():
        project = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == OWN:
            groups = project.get("entry-points", {})
            points = [EntryPoint(n, value, group) for group, names in groups.items() for n, value in names.items()]
            return points, [*project.get("optional-dependencies", {})]
    one = next(iter(distributions(name=OWN)), None)
    return ((), ()) if one is None else ([*one.entry_points], one.metadata.get_all("Provides-Extra") or ())


# Modules and files.


def import_attr(path: NameOrObject, *, base: Path | None = None, key: str | None = None) -> Any:
    """Import `pkg.mod:Attr`, `pkg.mod.Attr` or `folder/file.py:Attr`; return the target of a live object.

    Args:
        path: An import path, or a live object.
        base: The folder that relative file paths start from.
        key: The configuration key that holds the path, for messages.

    Raises:
        ConfigError: `path` has none of these forms, or a definition in the module is wrong, such as a tool's.
        MissingModuleError: the module or file cannot be found or imported.
        MissingAttributeError: the module has no such attribute.
    """
    if isinstance(path, LiveObject):
        return path.target
    try:
        return _import_attr(path, base=base)
    except ConfigError as problem:
        if key is None:
            raise
        raise type(problem)(f"{key}: {problem}") from problem


def _import_attr(path: str, *, base: Path | None) -> Any:
    where, colon, name = path.rpartition(":")
    if not colon:
        where, _, name = path.rpartition(".")
    if not where or not name or (not colon and name == "py"):
        raise ConfigError(f"{path!r} is not an import path; write it as 'package.module:Name' or 'file.py:Name'")
    module = import_file((base or Path()) / os.path.expanduser(where)) if where.endswith(".py") else _import_module(where)
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError as problem:
        hint = did_you_mean(name, _own_names(module))
        raise MissingAttributeError(f"{where!r} has no attribute {name!r}.{hint}") from problem


def _own_names(module: ModuleType) -> list[str]:
    """Return the public names of a module, without those that it imports from elsewhere."""
    root = module.__name__.partition(".")[0]
    own = {n: v for n, v in vars(module).items() if not n.startswith("_") and not isinstance(v, ModuleType)}
    return [n for n, v in own.items() if str(getattr(v, "__module__", root)).partition(".")[0] == root]


def import_file(path: Path) -> ModuleType:
    """Import a Python file as a separate module; later calls return the same module.

    Its folder goes to the end of `sys.path` and stays there: the file's functions may import other files of the folder
    later, and the processes of a run receive `sys.path`. Installed packages take precedence over files of the folder.

    Raises:
        MissingModuleError: there is no such file, or importing it fails.
        ConfigError: a definition in it is wrong, such as a tool's; or it imports a file beside it, and another of that name
            comes first.
    """
    with _LOADING:
        return _import_once(str(path.resolve()))


@functools.cache
def _import_once(path: str) -> ModuleType:
    if not (path.endswith(".py") and Path(path).is_file()):
        raise MissingModuleError(f"there is no Python file {path!r}; a path in a config is relative to the config's folder")
    name = f"polyturn_plugin_{Path(path).stem}_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses and pickle look it up by name
    try:
        _refuse_hidden_neighbours(Path(path))
        if (folder := os.path.dirname(path)) not in sys.path:
            sys.path.append(folder)
        importlib.invalidate_caches()  # a finder may have listed the folder before a file was written
        _with_stand_in(spec.loader.exec_module, module)
    except PLUGIN_RAISES as problem:
        del sys.modules[name]
        if isinstance(problem, ConfigError):
            raise _with_line(problem) from problem
        # The message of a syntax error already has the line; errors in imported files belong to another file.
        frames = () if isinstance(problem, SyntaxError) else traceback.extract_tb(problem.__traceback__)
        line = next((f", at line {frame.lineno}" for frame in reversed(frames) if frame.filename == path), "")
        raise MissingModuleError(
            f"{path!r} fails when imported{line}: {one_line(problem)}{_install_hint(problem)}"
        ) from problem
    return module


def _refuse_hidden_neighbours(file: Path) -> None:
    """Refuse a file that imports another beside it, itself or through that, if the name leads to an author's other file."""
    files = [file]
    for one in files:  # the loop extends the list
        for name in sorted(_imported_roots(one)):
            beside = next(filter(Path.is_file, (file.parent / name / "__init__.py", file.with_name(f"{name}.py"))), None)
            if beside is None or beside in files:
                continue
            files.append(beside)
            module, spec = sys.modules.get(name), importlib.machinery.PathFinder.find_spec(name)
            other = getattr(module, "__file__", None) if module else spec.origin if spec else None
            if other and is_an_authors(other) and Path(other).resolve() != beside.resolve():
                raise ConfigError(
                    f"{str(one)!r} imports {name!r} and would get {other}, not {beside}; rename one of the two"
                )


def _imported_roots(file: Path) -> set[str]:
    """Return the top-level names of the modules that a file imports; none for a file with a syntax error."""
    try:
        nodes = [*ast.walk(ast.parse(file.read_bytes()))]
    except (SyntaxError, ValueError):  # the import reports it
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}


def load_plugins(files: Sequence[str | Path], *, base: Path | None = None) -> list[ModuleType]:
    """Import each plug-in file once, under its file name, and put its folder on `sys.path` for the files beside it.

    Args:
        files: The files.
        base: The folder that relative paths start from.

    Raises:
        ConfigError: a file is missing or fails when imported, or another module has its name.
    """
    return [_load_plugin((base or Path()).joinpath(os.path.expanduser(file)).resolve()) for file in files]


def _load_plugin(path: Path) -> ModuleType:
    if not path.is_file() or path.suffix != ".py":
        raise MissingModuleError(
            f"plugins: there is no Python file {str(path)!r}; a path is relative to the config's folder"
        )
    name = path.name.partition(".")[0]
    if (module := sys.modules.get(name)) is not None:
        if Path(module.__file__ or "").resolve() == path:
            return module
        raise ConfigError(
            f"plugins: {str(path)!r} would be the module {name!r}, which is imported already from {module.__file__}; rename "
            "the file"
        )
    if str(path.parent) in sys.path:
        sys.path.remove(str(path.parent))
    sys.path.insert(0, str(path.parent))
    importlib.invalidate_caches()  # a finder may have listed the folder before the file was written
    try:
        module = _with_stand_in(importlib.import_module, name)
    except PLUGIN_RAISES as problem:
        sys.modules.pop(name, None)
        if isinstance(problem, ConfigError):
            raise _with_line(problem) from problem
        if isinstance(problem, PolyturnError):
            raise
        reason = f"{one_line(problem)}{raised_at(problem)}{_install_hint(problem)}"
        raise MissingModuleError(f"the plug-in {str(path)!r} fails when imported: {reason}") from problem
    logger.info("plug-in %s (sha256 %s)", path, hashlib.sha256(path.read_bytes()).hexdigest()[:12])
    return module


def _import_module(name: str) -> ModuleType:
    try:
        return _with_stand_in(importlib.import_module, name)
    except PLUGIN_RAISES as problem:
        if isinstance(problem, ConfigError):
            raise _with_line(problem) from problem
        raise MissingModuleError(
            f"the module {name!r} cannot be imported ({one_line(problem)}){raised_at(problem)}; check its spelling, "
            f"and that its folder is installed or on PYTHONPATH{_installed_hint(problem)}{_install_hint(problem, but=name)}"
        ) from problem


def _with_line(problem: ConfigError) -> ConfigError:
    """Return an error that a plug-in's import raised, with the plug-in's line, such as a tool without type hints."""
    at = raised_at(problem)
    return type(problem)(str(problem) if at.partition(",")[0] in str(problem) else f"{problem}{at}")


def _install_hint(problem: BaseException, *, but: str = "") -> str:
    """Return the command that installs a package that a file imports; "" for other errors, and for the module `but`."""
    name = problem.name if isinstance(problem, ModuleNotFoundError) else None
    if not name or "." in name or name == but.partition(".")[0]:
        return ""
    return f"; if {name} is a package, install it: pip install {name}"


# Stand-ins for other libraries, which plug-ins written for those libraries import.


def _with_stand_in(load: Callable[[Any], T], what: Any) -> T:
    """Return `load(what)`; if a library is missing that polyturn can stand in for, install the stand-in and try again."""
    try:
        return load(what)
    except ModuleNotFoundError as problem:
        if not offer_namespace(problem):
            raise
        return load(what)


def offer_namespace(problem: ModuleNotFoundError) -> bool:
    """Install the stand-in for the missing library if an entry point offers one; return whether the stand-in is active."""
    root = (problem.name or "").partition(".")[0]
    return root in offered(NAMESPACES) and install_namespace(root)


def install_namespace(root: str) -> bool:
    """Install the stand-in of a library; return whether it is active. If the library itself is installed, it is not.

    Raises:
        ConfigError: the entry point of the stand-in is broken.
    """
    return bool(load_offered(NAMESPACES, root, where=f"the library {root!r}")())


def _installed_hint(problem: BaseException) -> str:
    """Return advice for a module that the installed version of a library does not have; "" for other errors."""
    if not isinstance(problem, ModuleNotFoundError) or "." not in (problem.name or ""):
        return ""
    root = str(problem.name).partition(".")[0]
    if root not in offered(NAMESPACES) or offer_namespace(problem):
        return ""
    return (
        f". The {root} that is installed has no such module, and polyturn answers to that name only where {root} is not "
        f"installed: name the class under polyturn, or uninstall {root}"
    )
