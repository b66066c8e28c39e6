"""Plug-in files: a YAML or JSON file with one top-level list of classes to build, for interactions and for tools.

    interaction:
      - name: gsm8k
        class_name: polyturn.interactions.gsm8k.Gsm8kInteraction
        config: {}

References such as `${oc.env:HOME}` are resolved.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError, UnknownNameError, did_you_mean, one_line
from polyturn.infra.live import LiveObject, NameOrObject

MOVED = {
    "polyturn.tools.a2a.A2ATool": "a2a_agents.py:A2ATool",
    "polyturn.interactions.a2a.A2AInteraction": "a2a_agents.py:A2AInteraction",
}
"""Path of a class that became an example -> its path in the copied example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginEntry:
    """One checked item of the list."""

    where: str
    """The item's name in error messages, for instance "tools.yaml: tools[1]"."""
    class_name: NameOrObject
    config: dict[str, Any]
    fields: Mapping[str, Any]
    """All keys of the item with their values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginFile:
    """The checked items, and the folder that relative paths in them start from."""

    entries: tuple[PluginEntry, ...]
    base: Path | None


def read_plugin_file(
    source: str | Path | Mapping[str, Any] | list[Any],
    *,
    key: str,
    of: str,
    allowed: Collection[str],
    base: Path | None = None,
) -> PluginFile:
    """Read and check the list under `key` from a file, or from its content.

    Args:
        source: A path to a YAML or JSON file, its content, or just the list.
        key: The top-level list, "interaction" or "tools".
        of: The configuration key with the file's name or the list, "rollout.interactions".
        allowed: The keys an item may have.
        base: The folder that relative paths start from; the file's own folder by default.

    Raises:
        ConfigError: the file is missing or is not YAML, the list is missing, or an item is invalid.
        UnknownNameError: an item names one of `MOVED`.
    """
    if isinstance(source, list):
        source = {key: source}
    if isinstance(source, Mapping):
        origin, data = of, _resolved(source, where=of)
    else:
        path = Path(os.path.expanduser(source))
        path = base / path if base is not None and not path.is_absolute() else path
        origin, data = str(path), read_resolved(path)
        base = path.parent
    if key not in data:
        hint = did_you_mean(key, map(str, data)) if data else " It is empty."
        keys = ", ".join(map(repr, sorted(allowed)))
        raise ConfigError(f"{origin}: there is no top-level list {key!r}, whose items have the keys {keys}.{hint}")
    items = data[key] if data[key] is not None else []
    if not isinstance(items, list):
        raise ConfigError(f"{origin}: {key!r} must be a list of items with a class_name, not {items!r:.100}")
    entries = tuple(_entry(item, where=f"{origin}: {key}[{i}]", allowed=allowed) for i, item in enumerate(items))
    return PluginFile(entries=entries, base=base)


def _entry(item: Any, *, where: str, allowed: Collection[str]) -> PluginEntry:
    if not isinstance(item, Mapping):
        raise ConfigError(f"{where}: an item must be a mapping with a class_name, not {item!r:.100}")
    for name in item:
        if name not in allowed:
            raise ConfigError(f"{where}: unknown key {name!r}.{did_you_mean(str(name), allowed)}")
    class_name = item.get("class_name")
    if not isinstance(class_name, str | LiveObject) or not class_name:
        raise ConfigError(
            f"{where}: class_name is {class_name!r}; write the class as 'package.module.Class' or 'file.py:Class'"
        )
    if class_name in MOVED:
        raise UnknownNameError(
            f"{where}: class_name is {class_name!r}, which is an example now: copy examples/a2a_agents.py of polyturn's "
            f"repository beside this file, and write class_name: {MOVED[class_name]}"
        )
    config = item.get("config")
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"{where}: config must be a mapping, not {config!r:.100}")
    return PluginEntry(where=where, class_name=class_name, config=dict(config or {}), fields=dict(item))


def read_resolved(path: Path) -> dict[str, Any]:
    """Return the content of a YAML or JSON file with every `${...}` resolved.

    Raises:
        ConfigError: there is no such file, its top level is not a mapping, or a reference cannot be resolved.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {str(path)!r}; a path in a file is relative to the folder of that file")
    if path.suffix != ".json":
        from polyturn.infra.yaml_file import read_yaml  # which imports omegaconf

        return _resolved(read_yaml(path), where=str(path))
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ConfigError(f"{path}: this is not valid JSON: {one_line(problem)}") from problem
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: the top level must be a mapping, not {type(data).__name__}")
    return _resolved(data, where=str(path))


def _resolved(data: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return a deep plain copy with every `${...}` resolved."""
    plain: dict[str, Any] = _plain(data)
    if "${" not in repr(plain):
        return plain
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        resolved = OmegaConf.to_container(OmegaConf.create(plain, flags={"allow_objects": True}), resolve=True)
    except OmegaConfBaseException as problem:
        raise ConfigError(f"{where}: a reference cannot be resolved: {one_line(problem)}") from problem
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return (
        [_plain(inner) for inner in value] if isinstance(value, Sequence) and not isinstance(value, str | bytes) else value
    )
