"""MCPBaseTool: a tool of an MCP server, through the official SDK (the extra `mcp`).

    - class_name: polyturn.tools.mcp.MCPBaseTool
      config: {type: mcp, session: episode, timeout: 120}
      mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [search]}      no list: every tool of every server

    servers.json   {"mcpServers": {"files": {"command": "python", "args": ["server.py"], "env": {…}},
                                   "web": {"url": "https://…/mcp", "auth_token": "…"}}}

One item of the file becomes one tool object per tool of its servers. The first call connects to a server. The error that the
model sees tells the failures apart: the tool refused, the server is gone, or the deadline passed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from uuid import uuid4

from pydantic import Field

from polyturn.core.errors import LifecycleError, ToolConnectionError, ToolError
from polyturn.core.messages import Origin
from polyturn.infra.aio import Pace
from polyturn.infra.settings import AtLeastOne, Seconds, Settings
from polyturn.tools.base import BaseTool
from polyturn.tools.mcp_connection import McpLimits, McpServer, SessionMode
from polyturn.tools.mcp_content import images_of, text_of
from polyturn.tools.schema import ToolResponse


class McpSettings(Settings):
    """The settings of the tools of one item."""

    type: str = "mcp"
    session: SessionMode = "run"
    """`run` shares one session among all episodes; `episode` opens a session for each episode."""
    timeout: Seconds = 30.0
    """Deadline of a call, in seconds."""
    rate_limit: Annotated[float, Field(gt=0)] = 120.0
    """Maximum number of calls per second."""
    max_concurrency: AtLeastOne | None = None
    connect_timeout: Seconds = 30.0
    keep: Annotated[float, Field(ge=0)] = 30.0
    max_answer_bytes: Annotated[int, Field(ge=1024)] = 8 << 20

    @property
    def limits(self) -> McpLimits:
        """The limits of the item's servers."""
        return McpLimits(connect_timeout_s=self.connect_timeout, max_answer_bytes=self.max_answer_bytes, keep_s=self.keep)


def read_config(cls: type[MCPBaseTool], config: Mapping[str, Any], *, who: str) -> McpSettings:
    """Read the config of a class's tools; a user's subclass may read further keys.

    Raises:
        ConfigError: a setting is unknown or invalid.
    """
    return McpSettings.read(config, who=who, ignores_others=cls not in (MCPBaseTool, MCPSearchTool))


class MCPBaseTool(BaseTool):
    """Passes calls on to an MCP server. Config: `McpSettings`; a subclass may read further keys."""

    origin = Origin.ENVIRONMENT

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        settings = read_config(type(self), config, who="the MCP tool")
        self.timeout = settings.timeout
        self._pace = Pace(settings.rate_limit)
        self._server: McpServer | None = None
        self._remote_name = self.name
        self._instance_dict: dict[str, dict[str, Any]] = {}

    def connect(self, server: McpServer, *, remote_name: str | None = None) -> None:
        """Set the server; the loader of tool files calls this once.

        Args:
            server: The server, which all of its tools share.
            remote_name: The server's name for the tool, if it differs from the run's.
        """
        self._server = server
        self._remote_name = remote_name or self.name

    @property
    def server(self) -> McpServer:
        """The server that executes the calls.

        Raises:
            LifecycleError: `connect` was not called.
        """
        if self._server is None:
            raise LifecycleError(f"tool {self.name!r} has no MCP server; build it from a tool file with `mcp` settings")
        return self._server

    @property
    def host(self) -> str | None:
        """The server's host, for the limit per host; None for a server that the run starts as a process."""
        return None if self._server is None else self._server.host

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Start an instance for one episode."""
        instance_id = str(uuid4()) if instance_id is None else instance_id
        self.server.open(instance_id)
        self._instance_dict[instance_id] = {}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Call the server's tool.

        Raises:
            ToolError: the tool refused, the server cannot be reached, or the deadline passed; the text says which.
            TooLargeError: the answer exceeds `max_answer_bytes`.
        """
        await self._pace.wait()
        try:
            result = await self.server.call(instance_id, self._remote_name, parameters, timeout_s=self.timeout)
        except ConnectionError as problem:
            raise ToolConnectionError(f"Connection failed: {problem}") from problem
        text, metadata = self._parse_tool_result(result.content)
        if result.is_error:
            raise ToolError(f"Tool call failed: {text}")
        if not result.content and result.structured_content is not None:
            text = text_of((), result.structured_content)
        return ToolResponse(text=text, image=images_of(result.content) or None), 0.0, metadata

    def _parse_tool_result(self, content: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        """Return the text for the model, and metrics; override this for a server with a custom format."""
        return text_of(content), {"num_parts": len(content)}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> None:
        """Return None: calls of the server do not affect the reward."""

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Drop the episode's state; raise KeyError for an id that was never created."""
        del self._instance_dict[instance_id]
        await self.server.close(instance_id)


class MCPSearchTool(MCPBaseTool):
    """A search tool of an MCP server, with a metric for the number of results; the answer is shown unchanged."""

    def _parse_tool_result(self, content: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        text, metadata = super()._parse_tool_result(content)
        counts = _count_results(text)
        return text, {**metadata, "status": "success" if counts else "no_results", "total_results": counts}


def _count_results(text: str) -> int:
    """Count the results in an answer: its titles or its URLs, whichever are more; a text with neither counts as 1."""
    titles = len(re.findall(r"""(?im)(?:^|["'{,]\s*)title["']?\s*:""", text))
    urls = len(re.findall(r"https?://", text))
    return max(titles, urls) or int(bool(text.strip()))
