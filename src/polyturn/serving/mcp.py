"""Serves the tools of a tool file over MCP, to any MCP client.

    an MCP session is an episode:
    initialize … tools/call ………… tools/call ………… DELETE, the end of the input, or silence
                 create, execute   execute         release, exactly once

A tool with state needs a session. The newest MCP version has no sessions, so clients are asked to use an older version.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from uuid import uuid4

import mcp.types as types
from mcp import MCPError
from mcp.server import Server
from mcp.server.context import ServerRequestContext
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS

from polyturn.core.errors import PolyturnError, one_line
from polyturn.core.messages import ToolCall
from polyturn.core.task import Task
from polyturn.core.trajectory import ToolResult
from polyturn.tools.episode_tools import EpisodeTools
from polyturn.tools.mcp_content import blocks_of
from polyturn.tools.schema import OpenAIFunctionToolSchema
from polyturn.tools.toolbox import Toolbox

logger = logging.getLogger(__name__)

_KEY = "polyturn"


class ToolServer:
    """Serves a toolbox over MCP and counts the live episodes."""

    def __init__(self, box: Toolbox, *, name: str = "polyturn", version: str = "") -> None:
        self.num_live = 0
        """Number of episodes that have begun and not ended."""
        self._box = box
        self._tools = [OpenAIFunctionToolSchema.model_validate(schema).to_mcp() for schema in box.schemas.values()]
        self.server: Server[Any] = Server(
            name, version=version, on_list_tools=self._list_tools, on_call_tool=self._call_tool
        )
        self.server.middleware.append(_demand_session)

    async def serve_stdio(self) -> None:
        """Serve one client over standard input and output until the input ends."""
        from mcp.server.runner import serve_loop
        from mcp.server.stdio import stdio_server

        async with stdio_server() as (reading, writing), self.server.lifespan(self.server) as state:
            await serve_loop(self.server, reading, writing, lifespan_state=state)

    def http_app(self, *, idle_s: float, max_sessions: int, max_body_bytes: int) -> Any:
        """Return an ASGI application that answers under /mcp; it has no access rules of its own.

        Args:
            idle_s: Seconds without a request after which an episode is ended.
            max_sessions: Largest number of concurrent episodes.
            max_body_bytes: Largest request body in bytes.
        """
        from mcp.server.transport_security import TransportSecuritySettings

        return self.server.streamable_http_app(
            session_idle_timeout=idle_s,
            max_sessions=max_sessions,
            max_request_body_size=max_body_bytes,
            transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        )

    async def _list_tools(
        self, context: ServerRequestContext[Any], params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=self._tools)

    async def _call_tool(
        self, context: ServerRequestContext[Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        call = ToolCall(id=str(context.request_id), name=params.name, arguments=params.arguments or {})
        try:
            session = await self._session(context)
            (result,) = await session.call([call])
        except PolyturnError as problem:
            return types.CallToolResult(content=blocks_of(one_line(problem), ()), is_error=True)
        return types.CallToolResult(content=_blocks(result), is_error=result.error is not None)

    async def _session(self, context: ServerRequestContext[Any]) -> EpisodeTools:
        """Return the episode of a connection; the first tool call begins it."""
        connection = context.session._connection  # the one object that lives as long as the client's session
        if _KEY not in connection.state:
            begun = EpisodeTools(self._box, f"mcp-{uuid4()}")
            self.num_live += 1
            connection.exit_stack.push_async_callback(self._end, begun)
            connection.state[_KEY] = begun, asyncio.ensure_future(begun.start(Task(id="mcp", prompt=())))
        session, starting = connection.state[_KEY]
        await asyncio.shield(starting)
        tool_session: EpisodeTools = session
        return tool_session

    async def _end(self, session: EpisodeTools) -> None:
        try:
            await session.close()
        finally:
            self.num_live -= 1


async def _demand_session(ctx: Any, call_next: Any) -> Any:
    """Refuse the protocol version without sessions, with the error that makes a client try an earlier version."""
    if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
        versions = {"supported": list(HANDSHAKE_PROTOCOL_VERSIONS), "requested": ctx.protocol_version}
        raise MCPError(
            code=types.UNSUPPORTED_PROTOCOL_VERSION,
            message="tools with state need a session; begin one with `initialize`",
            data=versions,
        )
    return await call_next(ctx)


def _blocks(result: ToolResult) -> list[Any]:
    """Return the content blocks that show a tool result to a model."""
    if isinstance(result.content, str):
        return blocks_of(result.content, ())
    text = "\n".join(str(part["text"]) for part in result.content if part["type"] == "text")
    others = [str(part["type"]) for part in result.content if part["type"] not in ("text", "image")]
    images = [str(part["image"]) for part in result.content if part["type"] == "image"]
    return blocks_of("\n".join([text, *(f"({kind}, which MCP cannot carry)" for kind in others)]).strip(), images)
