"""An MCP server for tests, over its standard input and output, or over HTTP: `mcp_server.py streamable-http PORT`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from mcp.server import MCPServer

logging.disable()
server = MCPServer("demo")


@server.tool()
def add(a: int, b: int = 2, tags: list[str] | None = None) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("broken")


@server.tool()
async def sleep(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "done"


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)


@server.tool()
def search(query: str) -> str:
    """Search."""
    return f'[{{"title": "{query}", "text": "one"}}, {{"title": "{query}", "text": "two"}}]'


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport=sys.argv[1], port=int(sys.argv[2]))  # type: ignore[call-overload]
    else:
        server.run()
