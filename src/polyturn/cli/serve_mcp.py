"""`polyturn serve --mcp TOOLS.yaml`: the tools of a tool file, or of a Python file, for any MCP client.

polyturn serve --mcp tools.yaml                      streamable HTTP, http://127.0.0.1:8000/mcp
polyturn serve --mcp tools.yaml --stdio              as a client's own process
"""

from __future__ import annotations

from pathlib import Path

from polyturn.cli.listening import listen, needing
from polyturn.cli.serve import ServeOptions
from polyturn.core.errors import ConfigError
from polyturn.core.run_loop import run_loop

MAX_SESSIONS = 1024
MAX_BODY_BYTES = 8 << 20


def run(source: Path, options: ServeOptions, *, stdio: bool = False, idle_s: float = 600.0) -> None:
    """Serve until a signal asks to stop, or the client's end.

    Args:
        source: A tool file (YAML or JSON), or a Python file with decorated functions.
        options: Address and token.
        stdio: Whether to speak over standard input and output.
        idle_s: Seconds of silence after which a session is ended.

    Raises:
        ConfigError: the tools cannot be built, or the address would be open to others.
    """
    with needing("mcp,serve", what="a server of tools"):
        from polyturn.serving.mcp import ToolServer
    from polyturn.tools.executor import ToolBox
    from polyturn.tools.options import ToolOptions
    from polyturn.tools.registry import initialize_tools_from_config, load_function_tools

    tools = load_function_tools(source) if source.suffix == ".py" else initialize_tools_from_config(source)
    if not tools:
        raise ConfigError(f"{source} has no tool to serve")
    timeout_s = 60.0 if options.deadline_s is None else options.deadline_s
    server = ToolServer(ToolBox(tools, ToolOptions(timeout_s=timeout_s, max_result_chars=None)))
    if stdio:
        run_loop(server.serve_stdio())
        return
    from polyturn.serving.guard import guarded

    rules = options.rules(max_body_bytes=MAX_BODY_BYTES)
    app = server.http_app(idle_s=idle_s, max_sessions=MAX_SESSIONS, max_body_bytes=MAX_BODY_BYTES)
    guarded(app, rules)
    listen(app, options, rules, what=f"tools {', '.join(tool.name for tool in tools)}", path="/mcp")
