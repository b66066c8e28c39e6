"""Builds the tools of a tool file's item with `mcp` settings: one object per tool of its servers.

    mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [add]}
    mcp: {servers: {calc: {command: python, args: [server.py]}}, prefix: true}      ->  calc_add, calc_divide, …

The servers' tools are listed only here, once; the run keeps this list.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import model_validator

from polyturn.core.errors import ConfigError, did_you_mean, one_line
from polyturn.infra.plugin_files import PluginEntry
from polyturn.infra.settings import Settings, Text
from polyturn.tools.base import read_schema
from polyturn.tools.mcp import MCPBaseTool, read_config
from polyturn.tools.mcp_client import list_tools, read_servers
from polyturn.tools.mcp_connection import McpServer


class McpItem(Settings):
    """The `mcp` settings of one item of a tool file."""

    shows_values: ClassVar[bool] = False

    mcp_servers_config_path: Text | None = None
    """The file with the servers."""
    servers: Mapping[Any, Any] | None = None
    """Server name -> its settings, in place of a file."""
    tool_selected_list: list[str] | None = None
    """The tools to use, by the names that the servers give them; null or an empty list selects all."""
    prefix: bool = False
    """Whether tools are named `server_tool`."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.mcp_servers_config_path is None) == (self.servers is None):
            raise ValueError(
                f"a tool of type 'mcp' has {'neither' if self.servers is None else 'both'} of mcp_servers_config_path and "
                "servers; give {mcp_servers_config_path: servers.json} or {servers: {name: {command: …}}}"
            )
        return self


def build_mcp_tools(entry: PluginEntry, cls: Any, *, base: Path | None) -> list[MCPBaseTool]:
    """Make a tool for every selected tool of the item's MCP servers; the tools of one server share its `McpServer`.

    Args:
        entry: The item.
        cls: The class that its `class_name` names.
        base: The base folder of relative paths.

    Raises:
        ConfigError: the item is invalid, a server cannot be reached, or two tools have the same name.
    """
    written = entry.fields.get("mcp")
    item = McpItem.read(written if isinstance(written, Mapping) else {}, who=f"{entry.where}: mcp")
    if not isinstance(cls, type) or not issubclass(cls, MCPBaseTool):
        raise ConfigError(
            f"{entry.where}: {entry.class_name} must inherit polyturn.tools.mcp.MCPBaseTool to be of type 'mcp'"
        )
    config, selected = read_config(cls, entry.config, who=entry.where), item.tool_selected_list or ()
    tools: list[MCPBaseTool] = []
    known: list[str] = []
    owner: dict[str, str] = {}
    for name, settings in _servers(item, where=entry.where, base=base).items():
        server = McpServer(name, settings, session=config.session, limits=config.limits)
        for schema in list_tools(name, settings):
            known.append(remote := schema["function"]["name"])
            if selected and remote not in selected:
                continue
            ours = f"{name}_{remote}" if item.prefix else remote
            _check_clash(ours, name, owner, where=entry.where)
            tool = _construct(cls, entry, {**schema, "function": {**schema["function"], "name": ours}})
            tool.connect(server, remote_name=remote)
            tools.append(tool)
    for name in selected:
        if name not in known:
            raise ConfigError(
                f"{entry.where}: no server has the tool {name!r} of mcp.tool_selected_list.{did_you_mean(name, known)}"
            )
    return tools


def _servers(item: McpItem, *, where: str, base: Path | None) -> dict[str, Mapping[str, Any]]:
    if item.mcp_servers_config_path is None:
        return read_servers(item.servers or {}, where=f"{where}: mcp.servers", folder=base)
    file = Path(item.mcp_servers_config_path)
    beside = file if base is None else base / file
    return read_servers(beside if beside.is_file() or not file.is_file() else file)


def _check_clash(ours: str, server: str, owner: dict[str, str], *, where: str) -> None:
    if (other := owner.get(ours)) == server:
        raise ConfigError(f"{where}: the server {server!r} lists the tool {ours!r} twice, and the model calls tools by name")
    if other is not None:
        raise ConfigError(
            f"{where}: the servers {other!r} and {server!r} both have a tool {ours!r}, and the model calls tools by name; "
            f"set mcp.prefix: true to call them '{other}_{ours}' and '{server}_{ours}', or choose in mcp.tool_selected_list"
        )
    owner[ours] = server


def _construct(cls: type[MCPBaseTool], entry: PluginEntry, schema: Any) -> MCPBaseTool:
    try:
        return cls(entry.config, read_schema(schema))
    except Exception as problem:
        raise ConfigError(f"{entry.where}: {entry.class_name}(config, tool_schema) raised {one_line(problem)}") from problem
