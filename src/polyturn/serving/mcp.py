"""Our tools as an MCP server: those of any tool file, for any MCP client.

    a session of MCP is an episode of ours:
    initialize … tools/call ………… tools/call ………… DELETE, the end of the input, or silence
                 create, execute   execute         release, exactly once

Separate from the rollout server because there is no model here. The newest protocol keeps no sessions, and a tool with a
memory needs one, so a client is asked to speak the one before it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import mcp.types as types
from mcp import MCPError
from mcp.server import Server
from mcp.server.context import ServerRequestContext
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
_SESSION = "mcp-session-id"


class ToolServer:
    """The tools of a box behind MCP; counts the episodes that live."""

    def __init__(self, box: Toolbox, *, name: str = "polyturn", version: str = "") -> None:
        self.num_live = 0
        """Episodes that were begun and not ended."""
        self._box = box
        self._tools = [OpenAIFunctionToolSchema.model_validate(schema).to_mcp() for schema in box.schemas.values()]
        self.server: Server[Any] = Server(
            name, version=version, on_list_tools=self._list_tools, on_call_tool=self._call_tool
        )
        self.server.middleware.append(_demand_session)

    async def serve_stdio(self) -> None:
        """Serve one client over standard input and output, until its end."""
        from mcp.server.runner import serve_loop
        from mcp.server.stdio import stdio_server

        async with stdio_server() as (reading, writing), self.server.lifespan(self.server) as state:
            await serve_loop(self.server, reading, writing, lifespan_state=state)

    def http_app(self, *, idle_s: float, max_sessions: int, max_body_bytes: int) -> Any:
        """Return an ASGI application that answers under /mcp; who may ask is for a guard in front of it.

        Args:
            idle_s: Seconds of silence after which an episode is ended.
            max_sessions: Episodes at once.
            max_body_bytes: The largest request.
        """
        from mcp.server.transport_security import TransportSecuritySettings

        app = self.server.streamable_http_app(
            session_idle_timeout=idle_s,
            max_sessions=max_sessions,
            max_request_body_size=max_body_bytes,
            transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        )
        app.add_middleware(_Shares, idle_s=idle_s, max_of_one=max(1, max_sessions // 2))
        return app

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
        """Return the episode of a connection, begun by its first call."""
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


class _Shares:
    """Lets no client hold more than its share of the sessions, so that others find one free."""

    def __init__(self, app: ASGIApp, *, idle_s: float, max_of_one: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._idle_s = idle_s
        self._max_of_one = max_of_one
        self._clock = clock
        self._held: dict[str, tuple[str, float]] = {}
        """Session -> who began it, and when it was last asked something."""
        self._beginning: Counter[str] = Counter()
        """Client -> its sessions whose first answer is on its way."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        session, client = Headers(scope=scope).get(_SESSION), (scope.get("client") or ("", 0))[0]
        if session is not None or scope["method"] != "POST":
            if session in self._held:
                self._held[session] = (self._held[session][0], self._clock())
            await self._app(scope, receive, self._ending(session, send) if scope["method"] == "DELETE" else send)
            return
        now = self._clock()
        self._held = {name: entry for name, entry in self._held.items() if now - entry[1] <= self._idle_s}
        if sum(who == client for who, _ in self._held.values()) + self._beginning[client] >= self._max_of_one:
            refusal = f"one client has {self._max_of_one} sessions at most, and all of yours are open; end one first"
            await PlainTextResponse(refusal, 429, {"Retry-After": "5"})(scope, receive, send)
            return

        async def begun(message: Message) -> None:
            if message["type"] == "http.response.start" and (name := Headers(raw=message["headers"]).get(_SESSION)):
                self._held[name] = (client, self._clock())
            await send(message)

        self._beginning[client] += 1
        try:
            await self._app(scope, receive, begun)
        finally:
            self._beginning[client] -= 1
            if not self._beginning[client]:
                del self._beginning[client]

    def _ending(self, session: str | None, send: Send) -> Send:
        async def ended(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 300 and session is not None:
                self._held.pop(session, None)
            await send(message)

        return ended


async def _demand_session(ctx: Any, call_next: Any) -> Any:
    """Refuse the protocol without sessions, in the words that make a client fall back to the one before."""
    if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
        versions = {"supported": list(HANDSHAKE_PROTOCOL_VERSIONS), "requested": ctx.protocol_version}
        raise MCPError(
            code=types.UNSUPPORTED_PROTOCOL_VERSION,
            message="tools with a memory need a session; begin one with `initialize`",
            data=versions,
        )
    return await call_next(ctx)


def _blocks(result: ToolResult) -> list[Any]:
    """Return a model's view of a result as content blocks."""
    if isinstance(result.content, str):
        return blocks_of(result.content, ())
    text = "\n".join(str(part["text"]) for part in result.content if part["type"] == "text")
    others = [str(part["type"]) for part in result.content if part["type"] not in ("text", "image")]
    images = [str(part["image"]) for part in result.content if part["type"] == "image"]
    return blocks_of("\n".join([text, *(f"({kind}, which MCP cannot carry)" for kind in others)]).strip(), images)
