"""verl.utils.import_utils: imports objects of Python files and modules by name."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from polyturn.compat.not_offered import __getattr__  # noqa: F401  (raises for names that are not offered)


def load_module(module_path: str | None, module_name: str | None = None) -> ModuleType | None:
    """Import `pkg://a.b`, or a file from a path or `file://…`; return None for an empty path.

    Args:
        module_path: The module or file.
        module_name: The name in `sys.modules` for a file's module; None does not add it.

    Raises:
        FileNotFoundError: the file does not exist.
        RuntimeError: the import fails, or another module has that name.
    """
    if not module_path:
        return None
    if module_path.startswith("pkg://"):
        return importlib.import_module(module_path.removeprefix("pkg://").replace("/", "."))
    file = Path(module_path.removeprefix("file://"))
    if not file.is_file():
        raise FileNotFoundError(f"the module file {str(file)!r} does not exist")
    spec = importlib.util.spec_from_file_location(module_name or f"custom_module_{abs(hash(file.resolve()))}", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{str(file)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as problem:
        raise RuntimeError(f"Error loading module from {str(file)!r}: {problem}") from problem
    if module_name is not None and sys.modules.setdefault(module_name, module) is not module:
        raise RuntimeError(f"the module name {module_name!r} is already used by another module")
    return module


def load_extern_object(module_path: str | None, object_name: str) -> Any:
    """Return an object of a module that `load_module` imports.

    Raises:
        AttributeError: the module does not have the object.
    """
    module = load_module(module_path)
    if not hasattr(module, object_name):
        raise AttributeError(f"{module_path!r} has no {object_name!r}")
    return getattr(module, object_name)


def load_class_from_fqn(fqn: str, description: str = "class") -> Any:
    """Import `package.module.Name` and return it.

    Raises:
        ValueError: the name has another form.
        AttributeError: the module does not have the object.
    """
    module, _, name = fqn.rpartition(".")
    if not module:
        raise ValueError(f"the {description} {fqn!r} must be written package.module.Name")
    loaded = importlib.import_module(module)
    if not hasattr(loaded, name):
        raise AttributeError(f"the {description} {name!r} is not in the module {module!r}")
    return getattr(loaded, name)


def deprecated(replacement: str = "") -> Callable[[Any], Any]:
    """Return a decorator that logs a deprecation warning, with the replacement, when a function or class is called."""

    def decorate(old: Any) -> Any:
        call = old.__init__ if isinstance(old, type) else old  # type: ignore[misc]

        @functools.wraps(call)
        def warned(*args: Any, **kwargs: Any) -> Any:
            advice = f" Please use '{replacement}' instead." if replacement else ""
            warnings.warn(f"{old.__module__}.{old.__qualname__} is deprecated.{advice}", FutureWarning, stacklevel=2)
            return call(*args, **kwargs)

        if not isinstance(old, type):
            return warned
        old.__init__ = warned  # type: ignore[misc]
        return old

    return decorate
