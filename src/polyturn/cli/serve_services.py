"""`polyturn serve --mcp TOOLS | --sandbox | --search INDEX`: services for any client of their protocols.

polyturn serve --mcp tools.yaml                      the tools of a tool file by MCP, http://127.0.0.1:8000/mcp
polyturn serve --mcp tools.yaml --stdio              the same as a client's own process
polyturn serve --sandbox                             SandboxFusion's `run_code`, for tools and rewards that run programs
polyturn serve --search wiki.index                   Search-R1's `/retrieve` over an index on this machine
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from polyturn.cli.arguments import embedder_config
from polyturn.cli.listening import ServeOptions, listen, needing
from polyturn.core.errors import ConfigError
from polyturn.infra.loop import run_loop

MAX_SESSIONS = 1024
MAX_MCP_BYTES = 8 << 20


def serve_mcp(options: ServeOptions, source: Path, *, stdio: bool = False, idle_s: float = 600.0) -> None:
    """Serve tools until a signal, or with stdio until the client ends.

    Args:
        options: Address and token.
        source: A tool file (YAML or JSON), or a Python file with decorated functions.
        stdio: Whether to use standard input and output.
        idle_s: Seconds without a request after which a session is ended.

    Raises:
        ConfigError: the tools cannot be built, or the address would be open to others.
    """
    with needing("mcp", what="a server of tools"):
        from polyturn.serving.mcp import ToolServer
    from polyturn.tools.options import ToolOptions
    from polyturn.tools.registry import initialize_tools_from_config, load_function_tools
    from polyturn.tools.toolbox import Toolbox

    tools = load_function_tools(source) if source.suffix == ".py" else initialize_tools_from_config(source)
    if not tools:
        raise ConfigError(f"{source} has no tool to serve")
    timeout_s = 60.0 if options.deadline_s is None else options.deadline_s
    server = ToolServer(Toolbox(tools, ToolOptions(timeout_s=timeout_s, max_result_chars=None)))
    if stdio:
        run_loop(server.serve_stdio())
        return
    from polyturn.serving.auth import guarded

    rules = options.rules(max_body_bytes=MAX_MCP_BYTES)
    app = server.http_app(idle_s=idle_s, max_sessions=MAX_SESSIONS, max_body_bytes=MAX_MCP_BYTES)
    guarded(app, rules)
    run_loop(listen(app, options, rules, what=f"tools {', '.join(tool.name for tool in tools)}", path="/mcp"))


def serve_sandbox(options: ServeOptions, *, python: Path | None = None) -> None:
    """Serve a sandbox for programs until a signal.

    Raises:
        ConfigError: the address would be open to others, or this machine cannot isolate code.
    """
    from polyturn.sandbox.python.interpreter import Interpreter
    from polyturn.sandbox.python.isolation import bare_python, interpreter_folders, require_isolation
    from polyturn.sandbox.python.limits import OUTPUT_OF_PROGRAMS, SandboxLimits
    from polyturn.serving.sandbox import MAX_BODY_BYTES, SandboxService, create_app

    rules = options.rules(max_body_bytes=MAX_BODY_BYTES)
    isolation = require_isolation(allow_unsafe=False)
    timeout_s = 30.0 if options.deadline_s is None else options.deadline_s
    limits = SandboxLimits(timeout_s=timeout_s, memory_mb=1024, output_bytes=OUTPUT_OF_PROGRAMS)
    interpreter = bare_python() if python is None else str(python)
    interpreter_folders(interpreter)
    slots = max(2, os.cpu_count() or 2)
    start = partial(Interpreter, limits, isolation=isolation, python=interpreter)
    service = SandboxService(start, limits=limits, max_concurrent=slots, max_waiting=64 * slots, warm=slots)
    app = create_app(service, rules=rules)
    run_loop(listen(app, options, rules, what="sandbox", path="/run_code", more=f" ({isolation.value})"))


def serve_search(
    options: ServeOptions, index: Path, *, topk: int = 3, embed: str | None = None, model: str | None = None
) -> None:
    """Serve a search index until a signal.

    Raises:
        ConfigError: the address would be open to others, or the index cannot be read.
    """
    from polyturn.retrieval.searcher import Searcher
    from polyturn.serving.search import MAX_BODY_BYTES, create_app

    rules = options.rules(max_body_bytes=MAX_BODY_BYTES)
    searcher = Searcher.of_config({"index": str(index), "embed": embedder_config(embed, model)})
    deadline_s = 30.0 if options.deadline_s is None else options.deadline_s
    app = create_app(searcher, topk=topk, deadline_s=deadline_s, rules=rules)
    details = f" ({len(searcher.index)} passages, {searcher.mode.value})"
    run_loop(listen(app, options, rules, what="search", path="/retrieve", more=details))
