"""Connections to MCP servers. The one module that imports the SDK, and only when a tool file asks for it.

    connection = McpConnection("files", {"command": "python", "args": ["server.py"]})
    connection.open()                            counts one user; the first call connects
    result = await connection.call("read", {"path": "a.txt"}, timeout_s=30)
    await connection.close()                     the last user disconnects

The SDK's client must be entered and left by one task, so a connection is a task of its own that holds the client open.
A server that dies is started or connected to again by the next call.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError, ToolError, did_you_mean, one_line

START_TRIES = 10
START_PAUSE_S = 2.0
_KEYS = ("command", "args", "env", "cwd", "url", "auth_token", "headers", "transport", "type")


class McpConnection:
    """One server, shared by all of its tools and all episodes."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self.name = name
        self._settings = settings
        self._num_users = 0
        self._holder: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Any] | None = None
        self._is_over = asyncio.Event()

    def open(self) -> None:
        """Count one user."""
        self._num_users += 1

    async def call(self, tool: str, arguments: dict[str, Any], *, timeout_s: float) -> Any:
        """Call a tool and return the SDK's `CallToolResult`.

        Raises:
            ToolError: the server refused the request, or did not answer in `timeout_s`, which a start is not part of.
            ConnectionError: the server cannot be reached, or broke off.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        client = await self.connect()
        try:
            async with asyncio.timeout(timeout_s):
                return await client.call_tool(tool, arguments)
        except TimeoutError as problem:
            raise ToolError(f"Tool call failed: no answer within {timeout_s:g} s") from problem
        except Exception as problem:
            if isinstance(problem, MCPError) and problem.code != CONNECTION_CLOSED:
                raise ToolError(f"Tool call failed: {problem}") from problem
            await self._drop()
            raise ConnectionError(f"MCP server {self.name!r}: {reason(problem)}") from problem

    async def close(self) -> None:
        """Count one user off; the last one disconnects."""
        self._num_users -= 1
        if self._num_users == 0:
            await self._drop()

    async def connect(self) -> Any:
        """Return the SDK's client, connected.

        Raises:
            ConnectionError: the server cannot be reached.
        """
        if self._holder is None or self._holder.done():
            self._is_over = asyncio.Event()
            self._ready = asyncio.get_running_loop().create_future()
            self._holder = asyncio.create_task(self._hold(self._ready, self._is_over))
        assert self._ready is not None
        try:
            return await asyncio.shield(self._ready)
        except Exception as problem:
            raise ConnectionError(f"MCP server {self.name!r}: {reason(problem)}") from problem

    async def _hold(self, ready: asyncio.Future[Any], is_over: asyncio.Event) -> None:
        """Keep one client open until nobody needs it."""
        try:
            async with make_client(self._settings) as client:
                ready.set_result(client)
                await is_over.wait()
        except Exception as problem:
            if not ready.done():
                ready.set_exception(problem)
                _ = ready.exception()  # seen, should nobody be waiting any more

    async def _drop(self) -> None:
        holder, self._holder, self._ready = self._holder, None, None
        if holder is not None:
            self._is_over.set()
            await asyncio.wait({holder})


def make_client(settings: Mapping[str, Any]) -> Any:
    """Return an SDK client of one server that is not connected yet; `async with` connects it.

    Raises:
        ConfigError: the SDK is not installed.
    """
    try:
        from mcp import Client, StdioServerParameters
        from mcp.client.sse import sse_client
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client
    except ImportError as problem:
        raise ConfigError("tools of type 'mcp' need the MCP SDK: pip install 'polyturn[mcp]'") from problem
    if "command" in settings:
        fields = {k: settings[k] for k in ("command", "args", "env", "cwd") if k in settings}
        return Client(StdioServerParameters(**fields))
    url, headers = str(settings["url"]), dict(settings.get("headers") or {})
    kind = settings.get("transport") or settings.get("type")
    if settings.get("auth_token"):
        headers["Authorization"] = f"Bearer {settings['auth_token']}"
        kind = kind or "sse"
    if kind == "sse" or (kind is None and url.rstrip("/").endswith("/sse")):
        return Client(sse_client(url, headers=headers))
    return Client(streamable_http_client(url, http_client=create_mcp_http_client(headers=headers)) if headers else url)


def read_servers(path: Path) -> dict[str, Mapping[str, Any]]:
    """Return name -> settings of the servers in a file with `mcpServers`; their commands run in the file's folder.

    Raises:
        ConfigError: the file is missing, or a server in it cannot work.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {str(path)!r}; mcp_servers_config_path is relative to the tool file's folder")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path}: this is not valid JSON: {one_line(problem)}") from problem
    servers = data.get("mcpServers") if isinstance(data, Mapping) else None
    if not isinstance(servers, Mapping) or not servers:
        raise ConfigError(f'{path}: write the servers as {{"mcpServers": {{"name": {{"command": …}} or {{"url": …}}}}}}')
    for name, settings in servers.items():
        if not isinstance(settings, Mapping) or ("command" in settings) == ("url" in settings):
            raise ConfigError(f"{path}: the server {name!r} needs either a command or a url; it is {settings!r:.100}")
        for key in settings:
            if key not in _KEYS:
                raise ConfigError(f"{path}: the server {name!r} has the unknown key {key!r}.{did_you_mean(key, _KEYS)}")
    folder = str(path.resolve().parent)
    return {name: {"cwd": folder, **s} if "command" in s else s for name, s in servers.items()}


def list_tools(name: str, settings: Mapping[str, Any], *, timeout_s: float = 60.0) -> list[dict[str, Any]]:
    """Return the schema of every tool of a server, in OpenAI's form with every keyword kept.

    Raises:
        ConfigError: the server could not be reached in `START_TRIES` tries or `timeout_s` seconds.
    """

    async def fetch() -> list[dict[str, Any]]:
        async with asyncio.timeout(timeout_s):
            for number in range(1, START_TRIES + 1):
                try:
                    async with make_client(settings) as client:
                        return [_schema(tool) for tool in await _all_tools(client)]
                except (ConfigError, TimeoutError, FileNotFoundError):
                    raise
                except Exception:
                    if number == START_TRIES:
                        raise
                    await asyncio.sleep(START_PAUSE_S)
        raise AssertionError("unreachable")

    try:
        found: list[dict[str, Any]] = _in_own_loop(fetch)
    except ConfigError:
        raise
    except BaseException as problem:
        raise ConfigError(
            f"Failed to initialize MCP tools after maximum retries: server {name!r}: {reason(problem)}; check its "
            "command or url, and that it runs"
        ) from problem
    return found


async def _all_tools(client: Any) -> list[Any]:
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def _schema(tool: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}, "required": [], **tool.input_schema}
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _in_own_loop(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine to its end in an event loop of its own, also where a loop is running already."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["result"] = asyncio.run(work())
        except BaseException as problem:
            outcome["error"] = problem

    thread = threading.Thread(target=run, name="polyturn-mcp", daemon=True)
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]


def reason(problem: BaseException) -> str:
    """Return the reason in an exception, out of the groups that task groups wrap it in."""
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    return one_line(problem)
