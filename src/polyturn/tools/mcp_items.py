"""Builds the tools of a tool file's item with `mcp` settings: one object per tool of its servers.

    mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [add]}
    mcp: {servers: {calc: {command: python, args: [server.py]}}, prefix: true}      ->  calc_add, calc_divide, …

The servers' tools are listed only here, once; the run keeps this list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError, did_you_mean, one_line
from polyturn.infra.plugin_files import PluginEntry
from polyturn.tools.base import read_schema
from polyturn.tools.mcp import MCPBaseTool
from polyturn.tools.mcp_client import list_tools, read_servers
from polyturn.tools.mcp_connection import McpLimits, McpServer

_KEYS = ("mcp_servers_config_path", "servers", "tool_selected_list", "prefix")


@dataclass(frozen=True, slots=True, kw_only=True)
class McpItem:
    """The `mcp` settings of one item of a tool file."""

    path: str | None
    """The file with the servers; None if the item itself contains them."""
    servers: Mapping[str, Any]
    selected: tuple[str, ...]
    """The servers' names of the selected tools; empty selects all."""
    prefix: bool
    """Whether tools are named `server_tool`."""


def read_item(settings: Any, *, where: str) -> McpItem:
    """Parse and check the `mcp` settings of an item.

    Raises:
        ConfigError: the settings are missing or wrong.
    """
    known = settings if isinstance(settings, Mapping) else {}
    path, servers = known.get("mcp_servers_config_path"), known.get("servers")
    if isinstance(path, str) == isinstance(servers, Mapping):
        has = f"the keys {', '.join(map(repr, known))}" if known else repr(settings)[:60]
        raise ConfigError(
            f"{where}: a tool of type 'mcp' needs mcp: {{mcp_servers_config_path: servers.json}}, or {{servers: {{name: "
            f"{{command: …}}}}}} in its place; it has {has}"
        )
    for key in known:
        if key not in _KEYS:
            raise ConfigError(f"{where}: mcp has the unknown key {key!r}.{did_you_mean(str(key), _KEYS)}")
    selected = known.get("tool_selected_list") or ()
    if isinstance(selected, str) or not all(isinstance(name, str) for name in selected):
        raise ConfigError(f"{where}: mcp.tool_selected_list must be a list of tool names, not {selected!r:.100}")
    if not isinstance(known.get("prefix", False), bool):
        raise ConfigError(f"{where}: mcp.prefix must be true or false, not {known['prefix']!r:.60}")
    return McpItem(path=path, servers=servers or {}, selected=tuple(selected), prefix=known.get("prefix", False))


def build_mcp_tools(entry: PluginEntry, cls: Any, *, base: Path | None) -> list[MCPBaseTool]:
    """Make a tool for every selected tool of the item's MCP servers; the tools of a server share it.

    Args:
        entry: The item.
        cls: The class that its `class_name` names.
        base: The base folder of relative paths.

    Raises:
        ConfigError: the item is invalid, a server cannot be reached, or two tools have the same name.
    """
    item = read_item(entry.fields.get("mcp"), where=entry.where)
    if not isinstance(cls, type) or not issubclass(cls, MCPBaseTool):
        raise ConfigError(
            f"{entry.where}: {entry.class_name} must inherit polyturn.tools.mcp.MCPBaseTool to be of type 'mcp'"
        )
    tools: list[MCPBaseTool] = []
    known: list[str] = []
    owner: dict[str, str] = {}
    for name, settings in _servers(item, where=entry.where, base=base).items():
        server = _server(name, settings, entry)
        for schema in list_tools(name, settings):
            known.append(remote := schema["function"]["name"])
            if item.selected and remote not in item.selected:
                continue
            ours = f"{name}_{remote}" if item.prefix else remote
            _check_clash(ours, name, owner, where=entry.where)
            tool = _construct(cls, entry, {**schema, "function": {**schema["function"], "name": ours}})
            tool.connect(server, remote_name=remote)
            tools.append(tool)
    for name in item.selected:
        if name not in known:
            raise ConfigError(
                f"{entry.where}: no server has the tool {name!r} of mcp.tool_selected_list.{did_you_mean(name, known)}"
            )
    return tools


def _servers(item: McpItem, *, where: str, base: Path | None) -> dict[str, Mapping[str, Any]]:
    if item.path is None:
        servers = read_servers(item.servers, where=f"{where}: mcp.servers")
        folder = None if base is None else str(base.resolve())
        return {n: {"cwd": folder, **s} if folder and "command" in s else s for n, s in servers.items()}
    beside = Path(item.path) if base is None else base / item.path
    return read_servers(beside if beside.is_file() or not Path(item.path).is_file() else Path(item.path))


def _server(name: str, settings: Mapping[str, Any], entry: PluginEntry) -> McpServer:
    config = entry.config
    try:
        limits = McpLimits(
            connect_timeout_s=float(config.get("connect_timeout", 30.0)),
            max_answer_bytes=int(config.get("max_answer_bytes", 8 << 20)),
            keep_s=float(config.get("keep", 30.0)),
        )
        return McpServer(name, settings, session=config.get("session", "run"), limits=limits)
    except (TypeError, ValueError) as problem:
        raise ConfigError(f"{entry.where}: {problem}") from problem


def _check_clash(ours: str, server: str, owner: dict[str, str], *, where: str) -> None:
    if ours in owner:
        other = owner[ours]
        between = (
            f"the servers {other!r} and {server!r} both have" if other != server else f"the server {server!r} has twice"
        )
        raise ConfigError(
            f"{where}: {between} a tool {ours!r}, and the model calls tools by name; set mcp.prefix: true to call them "
            f"'{other}_{ours}' and '{server}_{ours}', or choose with mcp.tool_selected_list"
        )
    owner[ours] = server


def _construct(cls: type[MCPBaseTool], entry: PluginEntry, schema: Any) -> MCPBaseTool:
    try:
        return cls(entry.config, read_schema(schema))
    except Exception as problem:
        raise ConfigError(f"{entry.where}: {entry.class_name}(config, tool_schema) raised {one_line(problem)}") from problem
