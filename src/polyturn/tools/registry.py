"""Builds the tools of a tool file.

    initialize_tools_from_config("tools.yaml")  ->  [Gsm8kTool, FunctionTool("search"), ...]

An item names a class, or an object made by `@polyturn.tool`. Names of tools are unique, because the model calls tools by
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from polyturn.core.errors import PLUGIN_RAISES, ConfigError, did_you_mean, one_line, raised_at
from polyturn.infra.live import NameOrObject
from polyturn.infra.plugin_files import PluginEntry, PluginFile, read_plugin_file
from polyturn.infra.plugin_shape import CallShape, Shape, check_class
from polyturn.infra.plugins import import_attr, import_file
from polyturn.tools.base import BaseTool, check_names, read_schema
from polyturn.tools.function import FunctionTool, tools_in
from polyturn.tools.mcp_items import build_mcp_tools
from polyturn.tools.sandbox_tools import SandboxTools


class ToolType(Enum):
    """The values of an item's `config.type`."""

    NATIVE = "native"
    MCP = "mcp"


TOOL = Shape(
    what="a tool",
    needs=(("execute",),),
    bases=(BaseTool,),
    needs_alone=("create", "execute", "calc_reward", "release"),
    calls={
        "create": CallShape(num=1, write="async def create(self, instance_id=None, **kwargs)"),
        "execute": CallShape(num=2, write="async def execute(self, instance_id, parameters, **kwargs)"),
        "calc_reward": CallShape(num=1, or_num=0, write="async def calc_reward(self, instance_id, **kwargs)"),
        "release": CallShape(num=1, or_num=0, write="async def release(self, instance_id, **kwargs)"),
    },
)
"""The methods of a tool's class."""


def check_tools(source: str | Path | Mapping[str, Any] | list[Any], *, base: Path | None = None) -> None:
    """Check the class of every tool of a file, or of a mapping with the same content, without making tools.

    Raises:
        ConfigError: an item cannot be read, or its class is not a tool.
    """
    file = _read(source, base=base)
    for entry in file.entries:
        _checked_class(entry, base=file.base)


def _read(source: str | Path | Mapping[str, Any] | list[Any], *, base: Path | None) -> PluginFile:
    allowed = ("class_name", "config", "tool_schema", "mcp")
    return read_plugin_file(source, key="tools", of="rollout.tools.file", allowed=allowed, base=base)


def _checked_class(entry: PluginEntry, *, base: Path | None) -> Any:
    cls = get_tool_class(entry.class_name, base=base, key=f"{entry.where}.class_name")
    if isinstance(cls, type):
        check_class(cls, TOOL, where=entry.where)
    _check_settings(entry, cls)
    return cls


def _check_settings(entry: PluginEntry, cls: Any) -> None:
    """Check that an item has no settings that its kind of tool does not read.

    Raises:
        ConfigError: it has one.
    """
    is_mcp = entry.config.get("type") == ToolType.MCP.value
    is_several = is_mcp or (isinstance(cls, type) and issubclass(cls, SandboxTools))
    if is_several and entry.fields.get("tool_schema") is not None:
        raise ConfigError(f"{entry.where}: {entry.class_name} makes several tools and takes no tool_schema; remove it")
    if entry.fields.get("mcp") is not None and not is_mcp:
        raise ConfigError(f"{entry.where} has mcp, which only tools of type 'mcp' read; set config: {{type: mcp}}")
    unused = next((key for key in entry.config if key != "type"), None) if isinstance(cls, FunctionTool) else None
    if unused is not None:
        raise ConfigError(f"{entry.where}: {entry.class_name} is a function and reads no config; remove {unused!r} from it")


def get_tool_class(cls_name: NameOrObject, *, base: Path | None = None, key: str | None = None) -> Any:
    """Return the tool class, or the decorated function, that `pkg.module.Name` or `file.py:Name` names.

    `key` is the configuration key that contains the name, for messages.

    Raises:
        MissingModuleError, MissingAttributeError: there is no such module or attribute.
        ConfigError: the name refers to something else.
    """
    cls = import_attr(cls_name, base=base, key=key)
    if not isinstance(cls, type | FunctionTool):
        raise ConfigError(
            f"{key or 'class_name'} {cls_name!r} names a {type(cls).__name__}; it must name a tool class, or a function "
            "decorated with @polyturn.tool"
        )
    return cls


def initialize_tools_from_config(
    tools_config_file: str | Path | Mapping[str, Any] | list[Any], *, base: Path | None = None
) -> list[BaseTool]:
    """Build every tool of a YAML or JSON file, or of a mapping with the same content.

    Args:
        tools_config_file: The path of the file; or its content, {"tools": [{"class_name": ..., "config": {...},
            "tool_schema": {...}}]}; or only the list in it.
        base: The base folder of relative paths; by default the file's folder.

    Raises:
        ConfigError: an item is invalid, or two tools have the same name.
    """
    file = _read(tools_config_file, base=base)
    tools = [tool for entry in file.entries for tool in _build(entry, base=file.base)]
    check_names(tools)
    return tools


def load_function_tools(path: str | Path) -> list[FunctionTool]:
    """Return the functions of a Python file that are decorated as tools, in the file's order.

    Raises:
        ConfigError: the file does not exist, cannot be imported, or does not contain a decorated function.
    """
    tools = tools_in(import_file(Path(path)))
    if not tools:
        raise ConfigError(f"{str(path)!r} has no function decorated as a tool; write @polyturn.tool above one")
    return tools


def _build(entry: PluginEntry, *, base: Path | None) -> list[BaseTool]:
    kind = entry.config.get("type", ToolType.NATIVE.value)
    if kind == ToolType.MCP.value:
        return list(build_mcp_tools(entry, _checked_class(entry, base=base), base=base))
    if kind != ToolType.NATIVE.value:
        raise ConfigError(f"{entry.where}: the type is {kind!r}.{did_you_mean(str(kind), [t.value for t in ToolType])}")
    cls = _checked_class(entry, base=base)
    raw_schema = entry.fields.get("tool_schema")
    if isinstance(cls, FunctionTool):
        return [cls if raw_schema is None else FunctionTool(cls.function, schema=raw_schema, stateless=cls.stateless)]
    if issubclass(cls, SandboxTools):
        return _build_of_sandbox(cls, entry, base=base)
    return [_construct(cls, entry, raw_schema, base=base)]


def _build_of_sandbox(cls: type[SandboxTools], entry: PluginEntry, *, base: Path | None) -> list[BaseTool]:
    """Make the tools that share one sandbox per episode."""
    try:
        return cls.expand(entry.config, base=base)
    except ConfigError as problem:
        raise ConfigError(f"{entry.where}: {problem}") from problem


def _construct(cls: Any, entry: PluginEntry, raw_schema: Any, *, base: Path | None) -> BaseTool:
    config = entry.config
    if issubclass(cls, BaseTool) and cls.base_key is not None:
        config = {cls.base_key: str(base or Path()), **config}
    try:
        built: BaseTool = cls(config, read_schema(raw_schema))
    except PLUGIN_RAISES as problem:
        raise ConfigError(
            f"{entry.where}: {entry.class_name}(config, tool_schema) raised {one_line(problem)}{raised_at(problem)}"
        ) from problem
    return built
