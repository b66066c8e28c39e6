"""From a tool file to tools.

    initialize_tools_from_config("tools.yaml")  ->  [Gsm8kTool, FunctionTool("search"), ...]

An item names a class, or an object made by `@polyturn.tool`. Two tools never share a name, because the model calls them by
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError, did_you_mean, one_line
from polyturn.core.registry import import_attr
from polyturn.interactions.files import PluginEntry, read_plugin_file
from polyturn.tools.base import BaseTool, check_names, read_schema
from polyturn.tools.function import FunctionTool


def get_tool_class(cls_name: str, *, base: Path | None = None) -> Any:
    """Return the tool class, or the decorated function, that `pkg.module.Name` or `file.py:Name` names.

    Raises:
        MissingModuleError, MissingAttributeError: the path leads nowhere.
        ConfigError: it leads to something else.
    """
    found = import_attr(cls_name, base=base)
    if not isinstance(found, type | FunctionTool):
        raise ConfigError(
            f"class_name {cls_name!r} names a {type(found).__name__}; it must name a tool class, or a function decorated "
            "with @polyturn.tool"
        )
    return found


def initialize_tools_from_config(
    tools_config_file: str | Path | Mapping[str, Any], *, base: Path | None = None
) -> list[BaseTool]:
    """Build every tool of a YAML or JSON file, or of a mapping with the same content.

    Args:
        tools_config_file: The file, or {"tools": [{"class_name": ..., "config": {...}, "tool_schema": {...}}]}.
        base: The folder that relative paths start from; the file's own folder by default.

    Raises:
        ConfigError: an item cannot work, or two have one name.
    """
    file = read_plugin_file(
        tools_config_file, key="tools", allowed=("class_name", "config", "tool_schema", "mcp"), base=base
    )
    tools = [_build(entry, base=file.base) for entry in file.entries]
    check_names(tools)
    return tools


def _build(entry: PluginEntry, *, base: Path | None) -> BaseTool:
    kind = entry.config.get("type", "native")
    if kind == "mcp":
        raise ConfigError(f"{entry.where}: tools of type 'mcp' are not available yet; use a native tool")
    if kind != "native":
        raise ConfigError(f"{entry.where}: the type is {kind!r}.{did_you_mean(str(kind), ['native', 'mcp'])}")
    found = get_tool_class(entry.class_name, base=base)
    raw_schema = entry.fields.get("tool_schema")
    if isinstance(found, FunctionTool):
        return found if raw_schema is None else FunctionTool(found.function, schema=raw_schema)
    try:
        schema = read_schema(raw_schema)
        built: BaseTool = found(entry.config, schema)
    except Exception as problem:
        raise ConfigError(f"{entry.where}: {entry.class_name}(config, tool_schema) raised {one_line(problem)}") from problem
    return built
