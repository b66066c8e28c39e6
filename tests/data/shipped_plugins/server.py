"""A calculator as an MCP server, over standard input and output."""

from mcp.server import MCPServer

server = MCPServer("calculator")


@server.tool()
def add(a: float, b: float) -> str:
    """Add two numbers."""
    return f"{a + b:g}"


if __name__ == "__main__":
    server.run()
