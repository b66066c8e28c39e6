"""An MCP server for tests, built with the SDK: `mcp_sdk_server.py` on its standard input and output, or over HTTP:
`mcp_sdk_server.py sse|streamable-http PORT`, which prints a line once it listens."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from enum import Enum
from typing import Annotated, Any, Literal

import uvicorn
from mcp import types
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

server = MCPServer("demo")
seen: dict[str, Any] = {"calls": 0, "hung": 0, "cancelled": 0}


class Unit(Enum):
    METRE = "m"
    FOOT = "ft"


class Point(BaseModel):
    x: float
    y: float = 0.0
    next: Point | None = None


@server.tool()
def draw(
    points: list[Point],
    unit: Unit = Unit.METRE,
    style: Literal["solid", "dashed"] = "solid",
    width: Annotated[int, Field(ge=1, le=9, description="In pixels.")] = 1,
    origin: Point | str = "centre",
) -> str:
    """Draw."""
    return f"{len(points)} {unit.value} {style} {width} {origin}"


@server.tool()
def add(a: int, b: int = 2, tags: list[str] | None = None) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("the disk is full")


@server.tool()
def search(query: str) -> str:
    """Search."""
    return f'[{{"title": "{query}", "text": "one"}}, {{"title": "{query}", "text": "two"}}]'


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)


@server.tool()
def pid() -> str:
    """Return the id of this process."""
    return str(os.getpid())


@server.tool()
def count() -> str:
    """Count the calls of this tool."""
    seen["calls"] += 1
    return str(seen["calls"])


@server.tool()
async def hang() -> str:
    """Never answer, and count being cancelled."""
    seen["hung"] += 1
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        seen["cancelled"] += 1
        raise
    return ""


@server.tool()
def hung() -> str:
    """Return how many calls hang, or were cancelled."""
    return f"{seen['hung']} {seen['cancelled']}"


@server.tool(structured_output=False)
def large(size: int) -> str:
    """Return a long text."""
    return "x" * size


@server.tool()
def lie() -> Annotated[types.CallToolResult, Point]:
    """Return what does not fit the declared output."""
    return types.CallToolResult(content=[], structured_content={"x": "far"})


@server.tool()
async def learn(context: Context) -> str:
    """Change the list of tools."""
    server.add_tool(lambda: "new", name="fresh", description="New.")
    server.remove_tool("lie")
    await context.session.send_tool_list_changed()
    return "learnt"


if __name__ == "__main__":
    logging.disable()
    if len(sys.argv) > 1:
        app = server.sse_app() if sys.argv[1] == "sse" else server.streamable_http_app()
        listening = socket.create_server(("127.0.0.1", int(sys.argv[2])), reuse_port=True)
        sys.stdout.write("listens\n")
        sys.stdout.flush()
        asyncio.run(uvicorn.Server(uvicorn.Config(app, log_level="critical")).serve(sockets=[listening]))
    else:
        server.run()
