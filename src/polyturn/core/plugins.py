"""Plug-in files: Python files that register what they define when they are imported, named by `plugins` in a config.

    load_plugins([Path("my_envs.py"), Path("my_rewards.py")])

A file is imported as a module of its name, with its folder first on the path, so that it finds the files beside it. Separate
from the registry, which imports single classes: here the import itself is the point.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from polyturn.core.errors import ConfigError, MissingModuleError, PolyturnError, one_line
from polyturn.core.interrupts import PLUGIN_RAISES, pass_interrupt
from polyturn.core.registry import import_aliased

logger = logging.getLogger(__name__)

_LOADED: dict[str, tuple[Path, ModuleType]] = {}
"""Module name -> the file that it was loaded from, and the module."""


def load_plugins(files: Sequence[str | Path], *, base: Path | None = None) -> list[ModuleType]:
    """Import plug-in files, each once however often it is named; return their modules.

    Args:
        files: The files.
        base: The folder that relative paths start from.

    Raises:
        ConfigError: a file is missing or fails when imported, two have one name, or one has the name of another module.
    """
    paths = [(base or Path()).joinpath(Path(file).expanduser()).resolve() for file in files]
    return [_load(path) for path in paths]


def _load(path: Path) -> ModuleType:
    if not path.is_file() or path.suffix != ".py":
        raise MissingModuleError(
            f"plugins: there is no Python file {str(path)!r}; a path is relative to the config's folder"
        )
    name = path.name.partition(".")[0]
    if name in _LOADED:
        held, module = _LOADED[name]
        if held == path:
            return module
        raise ConfigError(
            f"plugins: {str(held)!r} and {str(path)!r} would both be the module {name!r}; rename one of the files"
        )
    if name in sys.modules and Path(sys.modules[name].__file__ or "").resolve() != path:
        raise ConfigError(
            f"plugins: {str(path)!r} would be the module {name!r}, which is imported already from "
            f"{sys.modules[name].__file__}; rename the file"
        )
    if str(path.parent) in sys.path:
        sys.path.remove(str(path.parent))
    sys.path.insert(0, str(path.parent))
    importlib.invalidate_caches()  # a finder may remember the folder from before the file was written
    try:
        module = import_aliased(name)
    except PolyturnError:
        sys.modules.pop(name, None)
        raise
    except PLUGIN_RAISES as problem:
        pass_interrupt(problem)
        sys.modules.pop(name, None)
        raise MissingModuleError(f"the plug-in {str(path)!r} fails when imported: {one_line(problem)}") from problem
    _LOADED[name] = path, module
    logger.info("plug-in %s (sha256 %s)", path, hashlib.sha256(path.read_bytes()).hexdigest()[:12])
    return module
