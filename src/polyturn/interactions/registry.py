"""Creates named interactions from an interaction file.

    initialize_interactions_from_config("interactions.yaml")  ->  {"gsm8k": Gsm8kInteraction, "tutor": MyTutor}

The default name is the class name in lower case without the ending `Interaction`. Names must be unique, because rows select
their interaction by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from polyturn.core.errors import PLUGIN_RAISES, ConfigError, did_you_mean, one_line, raised_at
from polyturn.infra.live import LiveObject, NameOrObject
from polyturn.infra.plugin_files import PluginEntry, PluginFile, read_plugin_file
from polyturn.infra.plugin_shape import CallShape, Shape, check_class, has_parameter, lacks
from polyturn.infra.plugins import import_attr
from polyturn.interactions.base import BaseInteraction, ViewInteraction

_CALLS = {
    "start_interaction": CallShape(num=1, write="async def start_interaction(self, instance_id=None, **kwargs)"),
    "generate_response": CallShape(num=2, write="async def generate_response(self, instance_id, messages, **kwargs)"),
    "respond": CallShape(num=3, write="async def respond(self, view, instance_id, messages, **kwargs)"),
    "calculate_score": CallShape(num=1, or_num=0, write="async def calculate_score(self, instance_id=None, **kwargs)"),
    "finalize_interaction": CallShape(
        num=1, or_num=0, write="async def finalize_interaction(self, instance_id=None, **kwargs)"
    ),
}
_KEYS = ("name", "class_name", "config")
"""The keys of an item of an interaction file."""
INTERACTION = Shape(
    what="an interaction",
    needs=(("generate_response",),),
    bases=(BaseInteraction,),
    needs_alone=("start_interaction", "generate_response", "calculate_score", "finalize_interaction"),
    calls={name: call for name, call in _CALLS.items() if name != "respond"},
    also=("snapshot", "restore", "check_setup", "check_row"),
)
"""The methods of an interaction's class."""
VIEW_INTERACTION = dataclasses.replace(
    INTERACTION,
    what="an interaction that sees its conversation",
    needs=(("respond", "generate_response"),),
    bases=(BaseInteraction, ViewInteraction),
    calls=_CALLS,
)


def check_interaction(cls: type, *, where: str = "") -> None:
    """Refuse a class without `generate_response` (or `respond`), or whose methods have other signatures than required.

    Raises:
        ConfigError: the first problem found.
    """
    check_class(cls, VIEW_INTERACTION if issubclass(cls, ViewInteraction) else INTERACTION, where=where)


def check_interactions(source: str | Path | Mapping[str, Any] | list[Any], *, base: Path | None = None) -> None:
    """Check the class of every interaction of a file, or of a mapping with the same content, without creating objects.

    Raises:
        ConfigError: an item is invalid, or its class is not an interaction.
    """
    file = _read(source, base=base)
    for entry in file.entries:
        check_interaction(_class_of(_class_or_object(entry, base=file.base)), where=entry.where)


def _read(source: str | Path | Mapping[str, Any] | list[Any], *, base: Path | None) -> PluginFile:
    return read_plugin_file(source, key="interaction", of="rollout.interactions", allowed=_KEYS, base=base)


def get_interaction_class(cls_name: NameOrObject, *, base: Path | None = None, key: str | None = None) -> type[Any]:
    """Return the class that `pkg.module.Class`, `pkg.module:Class` or `file.py:Class` names.

    `key` names the setting that holds `cls_name`; error messages show it.

    Raises:
        MissingModuleError, MissingAttributeError: there is no such module or attribute.
        ConfigError: the attribute is not a class.
    """
    cls = import_attr(cls_name, base=base, key=key)
    if not isinstance(cls, type):
        where = key or "class_name"
        raise ConfigError(f"{where} {cls_name!r} names a {type(cls).__name__}; it must name an interaction class")
    return cls


def _class_or_object(entry: PluginEntry, *, base: Path | None) -> Any:
    """Return the class that an item names, or the interaction itself if a program passed an object."""
    if isinstance(entry.class_name, LiveObject) and isinstance(entry.class_name.target, BaseInteraction):
        return entry.class_name.target
    return get_interaction_class(entry.class_name, base=base, key=f"{entry.where}.class_name")


def _class_of(target: Any) -> type[Any]:
    return target if isinstance(target, type) else type(target)


def initialize_interactions_from_config(
    interaction_config_file: str | Path | Mapping[str, Any] | list[Any],
    *,
    base: Path | None = None,
    policies: Mapping[str, Any] | None = None,
) -> dict[str, BaseInteraction]:
    """Create every interaction of a YAML or JSON file, or of a mapping with the same content.

    Args:
        interaction_config_file: The file, or {"interaction": [{"class_name": ..., "name": ..., "config": {...}}]}.
        base: The folder that relative paths are resolved against; the default is the file's folder.
        policies: The run's further policies, for a class that has a parameter of that name.

    Returns:
        Name -> interaction, in the file's order; the name is also in the interaction's config.

    Raises:
        ConfigError: an item is invalid, its class is not an interaction, or two items have the same name.
    """
    file = _read(interaction_config_file, base=base)
    out: dict[str, BaseInteraction] = {}
    for entry in file.entries:
        cls = _class_or_object(entry, base=file.base)
        check_interaction(_class_of(cls), where=entry.where)
        own_name = entry.fields.get("name")
        name = default_name(_class_of(cls).__name__) if own_name is None else str(own_name)
        if name in out:
            raise ConfigError(
                f"Duplicate interaction name '{name}' found in {entry.where}; give each interaction its own `name`"
            )
        if not isinstance(cls, type):
            out[name] = cls
            continue
        try:
            more: dict[str, Any] = {"base": file.base} if has_parameter(cls, "base") else {}
            more |= {"policies": policies or {}} if lacks(cls, "policies") else {}
            out[name] = cls({**entry.config, "name": name}, **more)
        except PLUGIN_RAISES as problem:
            reason = f"{one_line(problem)}{raised_at(problem)}"
            raise ConfigError(f"{entry.where}: {_class_of(cls).__name__}(config) raised {reason}") from problem
    return out


def unknown_interaction(name: str, known: Collection[str]) -> str:
    """Return the error message for an unknown interaction name. Users match on its beginning."""
    hint = did_you_mean(name, known) if known else " Name the YAML of your interactions in rollout.interactions."
    return (
        f"Interaction {name!r} not found in interaction_map. Available interactions: {sorted(known)}."
        f"{'' if hint.startswith(' Known') else hint}"
    )


def missing_interaction_name(known: Collection[str]) -> str:
    """Return the error message for `interaction_kwargs` without the required name. Users match on its beginning."""
    return f"'name' key is required in interaction_kwargs; give it one of {sorted(known)}"


def default_name(class_name: str) -> str:
    """Return the default name of a class: Gsm8kInteraction -> gsm8k, CustomAgent -> customagent."""
    return (class_name.removesuffix("Interaction") or class_name).lower()
