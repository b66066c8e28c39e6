"""An import finder that maps modules of a library that is not installed to modules of polyturn.

    Namespace(root="verl", modules={"verl.tools.schemas": "polyturn.tools.schema"}, packages={})
    import verl.tools.schemas          the same module object as polyturn.tools.schema, imported on demand

A listed module is an alias: the same object under a second name, so a replaced attribute is visible under both names. The
packages above it (verl, verl.tools) are synthetic. A package may have a body: modules whose names it re-exports and whose
attributes are set through it. If the library of a root is installed, the finder does nothing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from polyturn.core.errors import did_you_mean

_OURS = Path(__file__).resolve().parents[1]
_OWN = frozenset({"__name__", "__path__", "__spec__", "__loader__", "__package__", "__file__", "__doc__", "__class__"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """The modules under one root name."""

    root: str
    modules: Mapping[str, str]
    """Alias -> name of the actual module."""
    packages: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Package -> its body: the modules whose names it re-exports. Packages without a body need no entry."""
    library: Path | None = None
    """A file with the names of all modules of the library itself, to distinguish them from a project's modules."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """Module that is not offered, including its submodules -> the reason, or the replacement."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Name that the library's modules have and polyturn's do not -> the reason, or the replacement."""

    def package_names(self) -> frozenset[str]:
        """Return all packages: those with a body, and all parents of modules."""
        names = {self.root, *self.packages}
        for name in [*self.modules, *self.packages]:
            parts = name.split(".")
            names.update(".".join(parts[:i]) for i in range(1, len(parts)))
        return frozenset(names)


class AliasFinder(importlib.abc.MetaPathFinder):
    """Finds modules under one root. `install` and `uninstall` may be called in any order and any number of times."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self._packages = namespace.package_names()
        self._known = sorted({*self._packages, *namespace.modules})

    def install(self) -> bool:
        """Start answering imports; if the library itself is installed, do nothing and return False."""
        if self._is_installed():
            return False
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
            root = sys.modules.get(self.namespace.root)
            if root is not None and _is_folder(root):
                self._forget()  # a folder of that name was imported as the library
        return True

    def uninstall(self) -> None:
        """Stop answering imports, and remove the modules imported under the root."""
        if self not in sys.meta_path:
            return
        sys.meta_path.remove(self)
        self._forget()

    def _forget(self) -> None:
        root = self.namespace.root
        for name in [n for n in sys.modules if n == root or n.startswith(f"{root}.")]:
            del sys.modules[name]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module under the root, or None for other modules.

        Raises:
            ModuleNotFoundError: the module is under the root but is not offered; the message names alternatives.
        """
        root = self.namespace.root
        if fullname != root and not fullname.startswith(f"{root}."):
            return None
        if (alias := self.namespace.modules.get(fullname)) is not None:
            return importlib.machinery.ModuleSpec(fullname, _AliasLoader(alias))
        if fullname in self._packages:
            body = self.namespace.packages.get(fullname, ())
            return importlib.machinery.ModuleSpec(fullname, _PackageLoader(body, self._refusal), is_package=True)
        if fullname not in self._library and (own := _find_own(fullname)) is not None:
            return own
        raise ModuleNotFoundError(self._why_not(fullname), name=fullname)

    @functools.cached_property
    def _library(self) -> frozenset[str]:
        """Return the library's own modules."""
        file = self.namespace.library
        return frozenset() if file is None else frozenset(file.read_text(encoding="utf-8").split())

    def _refusal(self, fullname: str) -> str | None:
        """Return why a package does not offer a name; None if the name is unknown or may belong to the project.

        `from package import name` hides an error of `import package.name`, so the package itself must raise it.
        """
        name = fullname.rpartition(".")[2]
        if (why := self.namespace.names.get(name)) is not None:
            return f"cannot import {name!r}: polyturn, which stands in for {self.namespace.root}, does not offer it; {why}"
        is_known = fullname in self._library or any(f"{fullname}.".startswith(f"{n}.") for n in self.namespace.instead)
        return self._why_not(fullname) if is_known and fullname not in self._known else None

    def _why_not(self, fullname: str) -> str:
        parent = fullname.rpartition(".")[0]
        here = [n.rpartition(".")[2] for n in self._known if n.rpartition(".")[0] == parent]
        hint = f" {parent} has {', '.join(here)}." if here else did_you_mean(fullname, self._known)
        instead = (f" {why}" for name, why in self.namespace.instead.items() if f"{fullname}.".startswith(f"{name}."))
        return (
            f"No module named {fullname!r}: polyturn, which stands in for {self.namespace.root}, does not offer it."
            f"{next(instead, hint)}"
        )

    def _is_installed(self) -> bool:
        root = self.namespace.root
        if (loaded := sys.modules.get(root)) is not None:
            return not (isinstance(loaded, AliasPackage) or _is_folder(loaded) or _is_ours(loaded.__spec__))
        for finder in sys.meta_path:
            if isinstance(finder, AliasFinder):
                continue
            spec = finder.find_spec(root, None)
            # A folder of that name without an __init__.py, such as a data folder next to the script, is not the library.
            if _origin(spec) is not None and not _is_ours(spec):
                return True
        return False


class AliasPackage(ModuleType):
    """A synthetic package. Names that are not the package's own are read, set and deleted in its body."""

    def __init__(self, name: str, body: Sequence[str], refusal: Callable[[str], str | None]) -> None:
        super().__init__(name, None)
        self.__dict__.update(_body_names=tuple(body), _refusal=refusal)

    def _bodies(self) -> list[ModuleType]:
        return [importlib.import_module(name) for name in self.__dict__["_body_names"]]

    def _body(self, name: str) -> ModuleType | None:
        """Return the first module of the body that defines a name, as opposed to importing it."""
        bodies = ((module, vars(module)) for module in self._bodies())
        return next((m for m, names in bodies if name in names and not isinstance(names[name], ModuleType)), None)

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            offered = (name for module in self._bodies() for name in vars(module).get("__all__", vars(module)))
            return sorted({name for name in offered if not name.startswith("_") and self._body(name) is not None})
        body = None if name.startswith("__") else self._body(name)
        if body is not None:
            return vars(body)[name]
        if not name.startswith("__") and (refusal := self.__dict__["_refusal"](f"{self.__name__}.{name}")) is not None:
            raise ImportError(refusal, name=f"{self.__name__}.{name}")
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name in _OWN or name in self.__dict__ or isinstance(value, ModuleType)
        body = None if is_own else self._body(name) or next(iter(self._bodies()), None)
        if body is None:
            super().__setattr__(name, value)
        else:
            setattr(body, name, value)

    def __delattr__(self, name: str) -> None:
        body = None if name in self.__dict__ else self._body(name)
        if body is None:
            super().__delattr__(name)
        else:
            delattr(body, name)

    def __dir__(self) -> list[str]:
        return sorted(
            {*self.__dict__, *(name for module in self._bodies() for name in vars(module))} - {"_body_names", "_refusal"}
        )


class _PackageLoader(importlib.abc.Loader):
    def __init__(self, body: Sequence[str], refusal: Callable[[str], str | None]) -> None:
        self._body, self._refusal = body, refusal

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return AliasPackage(spec.name, self._body, self._refusal)

    def exec_module(self, module: ModuleType) -> None:
        for name in self._body:
            importlib.import_module(name)


class _AliasLoader(importlib.abc.Loader):
    """Loads an existing module under an alias without changing its name and spec."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._spec: importlib.machinery.ModuleSpec | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._target)
        self._spec = module.__spec__  # the import system will replace it by `spec`
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the module's code, for `python -m`."""
        spec = importlib.util.find_spec(self._target)
        loader = None if spec is None else spec.loader
        return loader.get_code(self._target) if isinstance(loader, importlib.abc.InspectLoader) else None

    def get_source(self, fullname: str) -> str | None:
        """Return the module's source, for tracebacks."""
        spec = importlib.util.find_spec(self._target)
        loader = None if spec is None else spec.loader
        return loader.get_source(self._target) if isinstance(loader, importlib.abc.InspectLoader) else None


def _find_own(fullname: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a project's own module under the root, as in a project inside a checkout of the library."""
    parts = fullname.split(".")[:-1]
    folders = [str(folder) for entry in sys.path if (folder := Path(entry, *parts)).is_dir()]
    own = importlib.machinery.PathFinder.find_spec(fullname, folders)
    return None if own is None or own.origin is None else own


def _is_folder(module: ModuleType) -> bool:
    """Return whether a module is only a folder without an __init__.py."""
    return not isinstance(module, AliasPackage) and module.__spec__ is not None and module.__spec__.origin is None


def _origin(spec: importlib.machinery.ModuleSpec | None) -> str | None:
    """Return the file of a module; None for a folder."""
    return None if spec is None else spec.origin


def _is_ours(spec: importlib.machinery.ModuleSpec | None) -> bool:
    """Return whether a module's file is in this package: a shim."""
    origin = _origin(spec)
    return origin is not None and _OURS in Path(origin).resolve().parents
