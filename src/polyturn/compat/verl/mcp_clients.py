"""verl.tools.utils.mcp_clients: one client for all servers of an MCP file, for tools that call them directly.

await ClientManager.initialize("servers.json", rate_limit=10)
schemas = await ClientManager.fetch_tool_schemas(["search"])          no names: every tool
result = await ClientManager.call_tool("search", {"query": "…"}, timeout=30)
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

from polyturn.compat.verl.limited import TokenBucket
from polyturn.core.errors import UnknownNameError, did_you_mean
from polyturn.infra.aio import Pace
from polyturn.tools.mcp_client import list_tools, read_servers
from polyturn.tools.mcp_connection import McpServer
from polyturn.tools.schema import OpenAIFunctionToolSchema

__all__ = ["ClientManager", "MCPClientManager", "TokenBucket", "mcp2openai"]


class MCPClientManager:
    """Calls tools on the MCP server that has them."""

    def __init__(self) -> None:
        self.initialized = False
        self.tool_client_mapping: dict[str, McpServer] = {}
        self._settings: dict[str, Any] = {}
        self._pace = Pace(10.0)

    async def initialize(self, config_path: str | Path, rate_limit: float = 10.0) -> None:
        """Read the file of servers; further calls have no effect."""
        if not self.initialized:
            self._settings, self._pace, self.initialized = dict(read_servers(Path(config_path))), Pace(rate_limit), True

    async def fetch_tool_schemas(self, tool_selected_list: Collection[str] | None = None) -> list[dict[str, Any]]:
        """Return the schemas of the selected tools; None selects all."""
        schemas: list[dict[str, Any]] = []
        for name, settings in self._settings.items():
            server = McpServer(name, settings)
            for schema in await asyncio.to_thread(list_tools, name, settings):
                tool = schema["function"]["name"]
                if not tool_selected_list or tool in tool_selected_list:
                    self.tool_client_mapping[tool] = server
                    schemas.append(schema)
        return schemas

    async def call_tool(self, tool_name: str, parameters: dict[str, Any], timeout: float) -> Any:
        """Call a tool, within the rate limit of `initialize`."""
        await self._pace.wait()
        server = self.get_client_with_tool_name(tool_name)
        server.open("verl")
        try:
            return await server.call("verl", tool_name, parameters, timeout_s=timeout)
        finally:
            await server.close("verl")

    def get_client_with_tool_name(self, tool_name: str) -> McpServer:
        """Return the server of a tool.

        Raises:
            UnknownNameError: `fetch_tool_schemas` has not found such a tool.
        """
        if tool_name not in self.tool_client_mapping:
            known = self.tool_client_mapping
            raise UnknownNameError(f"no MCP server has a tool {tool_name!r}.{did_you_mean(tool_name, known)}")
        return self.tool_client_mapping[tool_name]


def mcp2openai(mcp_tool: Any) -> dict[str, Any]:
    """Return the schema of a server's tool in OpenAI's form."""
    return OpenAIFunctionToolSchema.from_mcp(mcp_tool).to_dict()


ClientManager = MCPClientManager()
"""The client that all tools share."""
