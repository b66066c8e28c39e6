"""Plug-in files: a YAML or JSON file with one top-level list of classes to build, for interactions and for tools.

    interaction:
      - name: gsm8k
        class_name: polyturn.interactions.gsm8k.Gsm8kInteraction
        config: {}

Separate because both kinds of file are read, checked and reported on in the same way. References such as
`${oc.env:HOME}` are resolved.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from polyturn.core.errors import ConfigError, did_you_mean, one_line

TRANSLATED_KEYS = {
    "工具": "tools",
    "交互": "interaction",
    "名称": "name",
    "类名": "class_name",
    "配置": "config",
    "工具模式": "tool_schema",
}
"""Keys as translated documents print them, and what they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginEntry:
    """One item of the list, checked."""

    where: str
    """The item's name in error messages, for instance "tools.yaml: tools[1]"."""
    class_name: str
    config: dict[str, Any]
    fields: Mapping[str, Any]
    """Every key of the item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginFile:
    """The checked items, and the folder that relative paths in them start from."""

    entries: tuple[PluginEntry, ...]
    base: Path | None


def read_plugin_file(
    source: str | Path | Mapping[str, Any] | list[Any], *, key: str, allowed: Collection[str], base: Path | None = None
) -> PluginFile:
    """Read the list under `key` from a file, or from a mapping that holds the same.

    Args:
        source: A path to a YAML or JSON file, its content, or the list alone.
        key: The top-level list, "interaction" or "tools".
        allowed: The keys an item may have.
        base: The folder that relative paths start from; the file's own folder by default.

    Raises:
        ConfigError: the file is missing or is no YAML, the list is missing, or an item is not what it must be.
    """
    if isinstance(source, list):
        source = {key: source}
    if isinstance(source, Mapping):
        origin, data = f"the {key} config", _resolved(source, where=f"the {key} config")
    else:
        path = Path(source)
        path = base / path if base is not None and not path.is_absolute() else path
        origin, data = str(path), _load(path)
        base = path.parent
    _refuse_translated(data, origin=origin)
    if key not in data:
        hint = did_you_mean(key, map(str, data)) if data else " The file is empty."
        raise ConfigError(f"{origin}: there is no top-level list {key!r}.{hint}")
    items = data[key] if data[key] is not None else []
    if not isinstance(items, list):
        raise ConfigError(f"{origin}: {key!r} must be a list of items with a class_name, not {items!r:.100}")
    entries = tuple(_entry(item, where=f"{origin}: {key}[{i}]", allowed=allowed) for i, item in enumerate(items))
    return PluginFile(entries=entries, base=base)


def _refuse_translated(data: Mapping[str, Any], *, origin: str) -> None:
    """Raise a ConfigError that names the English keys where a file has translated ones."""
    items = [item for value in data.values() if isinstance(value, list) for item in value if isinstance(item, Mapping)]
    found = [str(k) for part in (data, *items) for k in part if k in TRANSLATED_KEYS]
    if found:
        said = ", ".join(f"{k!r} is {TRANSLATED_KEYS[k]!r}" for k in dict.fromkeys(found))
        raise ConfigError(
            f"{origin}: keys are written in English: {said}. A tool file has `tools`, each item with `class_name`, `config` "
            "and `tool_schema`; an interaction file has `interaction`, each item with `name`, `class_name` and `config`"
        )


def _entry(item: Any, *, where: str, allowed: Collection[str]) -> PluginEntry:
    if not isinstance(item, Mapping):
        raise ConfigError(f"{where}: an item must be a mapping with a class_name, not {item!r:.100}")
    for name in item:
        if name not in allowed:
            raise ConfigError(f"{where}: unknown key {name!r}.{did_you_mean(str(name), allowed)}")
    class_name = item.get("class_name")
    if not isinstance(class_name, str) or not class_name:
        raise ConfigError(
            f"{where}: class_name is {class_name!r}; write the class as 'package.module.Class' or 'file.py:Class'"
        )
    config = item.get("config")
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"{where}: config must be a mapping, not {config!r:.100}")
    return PluginEntry(where=where, class_name=class_name, config=dict(config or {}), fields=dict(item))


def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"there is no file {str(path)!r}; a path in a config is relative to the config's folder")
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError, UnicodeDecodeError) as problem:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise ConfigError(f"{path}: this is not valid {kind}: {one_line(problem)}") from problem
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: the top level must be a mapping, not {type(data).__name__}")
    return _resolved(data, where=str(path))


def _resolved(data: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return a deep plain copy with every `${...}` resolved; omegaconf is only imported where there is one."""
    if "${" not in repr(data):
        copied: dict[str, Any] = _plain(data)
        return copied
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        found = OmegaConf.to_container(OmegaConf.create(_plain(data)), resolve=True)
    except OmegaConfBaseException as problem:
        raise ConfigError(f"{where}: a reference cannot be resolved: {one_line(problem)}") from problem
    assert isinstance(found, dict)
    return {str(k): v for k, v in found.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(v) for v in value]
    return value
