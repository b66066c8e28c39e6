"""An MCP server for tests that does what servers do when they go wrong: `mcp_hostile_server.py [TRANSPORT PORT]`."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import sys
from enum import Enum
from typing import Annotated, Any, Literal

from mcp import types
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

server = MCPServer("hostile")
seen: dict[str, Any] = {"calls": 0, "hung": 0, "cancelled": 0}
morning = asyncio.Event()


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
    tags: dict[str, list[int]] | None = None,
    origin: Point | str = "centre",
) -> str:
    """Draw."""
    return f"{len(points)} {unit.value} {style} {width} {tags} {origin}"


@server.tool()
def pid() -> str:
    """Say which process this is."""
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
    """Say how many calls never got an answer."""
    return str(seen["hung"])


@server.tool()
def cancelled() -> str:
    """Say how many calls were cancelled."""
    return str(seen["cancelled"])


@server.tool()
async def nap() -> str:
    """Wait until all are woken."""
    await morning.wait()
    return "awake"


@server.tool()
async def wake() -> str:
    """Wake all who nap."""
    morning.set()
    return "morning"


@server.tool(structured_output=False)
def large(size: int) -> str:
    """Answer much."""
    return "x" * size


@server.tool()
def broken() -> str:
    """Fail."""
    raise ToolError("the disk is full")


@server.tool()
def lie() -> Annotated[types.CallToolResult, Point]:
    """Return what does not fit the declared output."""
    return types.CallToolResult(content=[], structured_content={"x": "far"})


@server.tool()
def picture() -> list[Any]:
    """Return an image and words."""
    dot = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
    sound = base64.b64encode(b"\0" * 3000).decode()
    return [
        "Here.",
        types.ImageContent(type="image", data=dot, mime_type="image/png"),
        types.AudioContent(type="audio", data=sound, mime_type="audio/wav"),
    ]


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
        server.run(transport=sys.argv[1], port=int(sys.argv[2]))  # type: ignore[call-overload]
    else:
        server.run()
