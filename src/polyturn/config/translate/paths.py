"""Converts the paths of a translated configuration from the working directory to the config's folder."""

from __future__ import annotations

import copy
import glob
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polyturn.config.translate.translation import Translation
from polyturn.core.errors import ConfigError


def absolute(translation: Translation, *, folder: Path | None) -> dict[str, Any]:
    """Return the native configuration with absolute paths.

    Args:
        translation: The translation, with paths relative to the working directory.
        folder: The config's folder, for paths that do not exist in the working directory.

    Raises:
        ConfigError: a path does not exist.
    """

    def rebase(path: str, key: str) -> str:
        near = Path(path)
        in_folder = None if folder is None else folder / near
        # os.path.exists returns False for invalid file names, for which a Path would raise
        if os.path.exists(near) or glob.has_magic(path):
            return str(near.absolute())
        if in_folder is not None and os.path.exists(in_folder):
            return str(in_folder.resolve())
        folders = " or ".join(dict.fromkeys(str(one.resolve()) for one in (Path.cwd(), folder) if one is not None))
        raise ConfigError(f"{key} is {path!r:.200}, and there is no such file in {folders}; check the path")

    return _changed(translation, rebase)


def relative_to(translation: Translation, folder: Path, *, config: Path) -> dict[str, Any]:
    """Return the native configuration with relative paths converted to start at `folder`.

    `config` is the folder of the translated config, at which paths in its section `polyturn` start.
    """

    def rebase(path: str, _: str) -> str:
        if Path(path).is_absolute():
            return path
        resolved = config / path if not Path(path).exists() and (config / path).exists() else Path(path)
        return os.path.relpath(resolved.absolute(), folder.absolute())

    native = _changed(translation, rebase)
    for path in translation.native_paths:
        at: Any = native
        for part in path[:-1]:
            at = at[part]
        at[path[-1]] = moved(at[path[-1]], start=config, end=folder)
    return native


def moved(values: Any, *, start: Path, end: Path) -> Any:
    """Return native values with existing paths relative to `start` converted to paths relative to `end`."""
    if isinstance(values, dict):
        return {k: moved(v, start=start, end=end) for k, v in values.items()}
    if isinstance(values, list):
        return [moved(v, start=start, end=end) for v in values]
    if not isinstance(values, str) or not values or Path(values).is_absolute():
        return values
    file, colon, name = values.partition(".py:")
    path = start / (f"{file}.py" if colon else file)
    if not os.path.exists(path):
        return values
    return os.path.relpath(path.absolute(), end.absolute()) + (f":{name}" if colon else "")


def _changed(translation: Translation, rename: Callable[[str, str], str]) -> dict[str, Any]:
    """Return the native configuration with every path replaced by `rename(path, key)`."""

    def change(value: Any, key: str) -> Any:
        if isinstance(value, list):
            return [change(v, key) for v in value]
        if not isinstance(value, str):
            return value
        file, colon, name = value.partition(".py:")
        return f"{rename(f'{file}.py', key)}:{name}" if colon else rename(value, key)

    native = copy.deepcopy(translation.native)
    for path in translation.paths:
        at: Any = native
        for part in path[:-1]:
            at = at[part]
        if path[-1] in at:
            at[path[-1]] = change(at[path[-1]], translation.origin.get(path, ".".join(path)))
    return native
