"""MCP servers of a configuration file, and an SDK client for each. The SDK is imported only if a tool file has MCP tools.

    {"mcpServers": {"files": {"command": "python", "args": ["server.py"], "env": {…}},
                    "web":   {"url": "https://…/mcp", "auth_token": "${oc.env:TOKEN}"},
                    "old":   {"url": "https://…/sse", "transport": "sse"}}}

A command is started as a process and used over its standard input and output. `transport` says whether a URL is reached by
streamable HTTP or by SSE; without it, `transport_of` decides by the path and the token. Standard output and streamable HTTP
limit the size of a single message.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import model_validator

from polyturn.core.errors import ConfigError, did_you_mean
from polyturn.core.secrets import bearer, is_secret_name, token_from
from polyturn.infra.aio import in_own_loop
from polyturn.infra.plugin_files import read_resolved
from polyturn.infra.retries import retried
from polyturn.infra.settings import Settings, Text
from polyturn.tools.mcp_connection import McpConnection, McpLimits, McpServer, reason
from polyturn.tools.mcp_stdio import StderrTail, stdio_transport
from polyturn.tools.schema import OpenAIFunctionToolSchema

__all__ = ["McpConnection", "McpLimits", "McpServer", "list_tools", "make_client", "read_servers", "reason"]

START_TRIES = 10
"""Number of tries for a URL when a run starts, because its server may still be starting. A command is tried twice."""
START_PAUSE_S = 2.0
MAX_CONNECTIONS = 1024
"""Maximum number of concurrent calls to one URL; further ones wait."""
_TRANSPORTS = ("stdio", "streamable_http", "streamable-http", "http", "sse")


class McpServerSettings(Settings):
    """The command or the URL of a server."""

    shows_values: ClassVar[bool] = False

    command: Text | None = None
    args: list[Any] | None = None
    env: Mapping[Any, Any] | None = None
    cwd: str | Path | None = None
    url: Text | None = None
    auth_token: Any = None
    token_env: Any = None
    headers: Mapping[Any, Any] | None = None
    transport: str | None = None
    type: str | None = None
    """Another name of `transport`."""

    @model_validator(mode="after")
    def _can_work(self) -> Self:
        if (self.command is None) == (self.url is None):
            which = "neither a command nor" if self.url is None else "both a command and"
            raise ValueError(f"the server has {which} a url; give one of them")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError("its url must begin with http:// or https://")
        token_of(self.model_dump())
        kind, key = self.transport or self.type, "command" if self.url is None else "url"
        if kind is not None and kind not in _TRANSPORTS:
            raise ValueError(f"the transport is {kind!r}.{did_you_mean(kind, ('stdio', 'streamable_http', 'sse'))}")
        if kind is not None and (kind == "stdio") != (key == "command"):
            raise ValueError(f"the transport is {kind!r}, which does not go with a {key}")
        return self


def make_client(
    settings: Mapping[str, Any],
    *,
    words: StderrTail | None = None,
    max_answer_bytes: int = 8 << 20,
    is_stateful: bool = False,
    on_message: Any = None,
) -> Any:
    """Return an unconnected SDK client of one server; `async with` connects it.

    Args:
        settings: The server's command or URL.
        words: Collects details for error messages.
        max_answer_bytes: Maximum size of an answer.
        is_stateful: Whether the server must keep a session for this client. If so, the older protocol is used over HTTP,
            because the newest one has no sessions there.
        on_message: Awaited with each notification.

    Raises:
        ConfigError: the SDK is not installed.
    """
    try:
        from mcp import Client, StdioServerParameters
        from mcp.client.sse import sse_client
        from mcp.client.streamable_http import streamable_http_client
    except ImportError as problem:
        raise ConfigError("tools of type 'mcp' need the MCP SDK: pip install 'polyturn[mcp]'") from problem
    words = StderrTail() if words is None else words
    if "command" in settings:
        env = {str(k): str(v) for k, v in (settings.get("env") or {}).items()}
        args = [str(one) for one in settings.get("args") or ()]
        server = StdioServerParameters(command=str(settings["command"]), args=args, env=env, cwd=settings.get("cwd"))
        return Client(stdio_transport(server, words, max_answer_bytes=max_answer_bytes), message_handler=on_message)
    url, headers = str(settings["url"]), dict(settings.get("headers") or {})
    headers |= bearer(token_of(settings))

    def http_client(headers: Any = headers, timeout: Any = None, auth: Any = None) -> Any:
        return _http_client(headers or {}, words, max_answer_bytes)

    mode = "legacy" if is_stateful else "auto"
    if transport_of(settings) == "sse":
        return Client(sse_client(url, headers, httpx_client_factory=http_client), mode=mode, message_handler=on_message)
    transport = _owning(
        http_client(), lambda c: streamable_http_client(url, http_client=c, max_sse_event_size=max_answer_bytes)
    )
    return Client(transport, mode=mode, message_handler=on_message)


def token_of(settings: Mapping[str, Any]) -> str | None:
    """Return the token for a server: `auth_token`, or the environment variable that `token_env` names.

    Raises:
        ConfigError: the variable is not set, or both settings are given.
    """
    secrets = {"token": settings.get("auth_token"), "token_env": settings.get("token_env")}
    return token_from(secrets, where="the MCP server")


def secrets_of(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the secrets in a server's settings: its token, its headers, and variables whose names suggest secrets."""
    named = [*(settings.get("env") or {}).items(), *(settings.get("headers") or {}).items()]
    return tuple(str(v) for k, v in [("token", token_of(settings)), *named] if v is not None and is_secret_name(str(k)))


def transport_of(settings: Mapping[str, Any]) -> str:
    """Return the transport of a server: stdio, streamable_http or sse.

    A URL without `transport` is reached by SSE if its path ends with /sse, or if it has a token and does not end with /mcp.
    """
    if "command" in settings:
        return "stdio"
    kind, path = settings.get("transport") or settings.get("type"), str(settings["url"]).rstrip("/")
    if kind is None:
        has_token = bool(settings.get("auth_token") or settings.get("token_env"))
        is_old = path.endswith("/sse") or (has_token and not path.endswith("/mcp"))
        return "sse" if is_old else "streamable_http"
    return "sse" if kind == "sse" else "streamable_http"


@contextlib.asynccontextmanager
async def _owning(client: Any, transport: Callable[[Any], Any]) -> AsyncIterator[Any]:
    """Enter an HTTP client and the transport over it."""
    async with client, transport(client) as streams:
        yield streams


def _http_client(headers: Mapping[str, str], words: StderrTail, max_answer_bytes: int) -> Any:
    """Return an HTTP client that records the last error status and limits the size of answers, except of streams."""
    import httpx2

    class Bounded(httpx2.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            total = 0
            async for chunk in self._stream:
                total += len(chunk)
                if total > max_answer_bytes:
                    raise httpx2.StreamError(f"the answer is larger than {max_answer_bytes} bytes; ask for less at once")
                yield chunk

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def look(response: Any) -> None:
        if response.status_code >= 400:
            words.http_status = response.status_code
        if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
            response.stream = Bounded(response.stream)

    return httpx2.AsyncClient(
        headers=dict(headers),
        timeout=httpx2.Timeout(30.0, read=None),  # calls have separate deadlines
        limits=httpx2.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=64),
        event_hooks={"response": [look]},
    )


def read_servers(
    source: Path | Mapping[str, Any], *, where: str = "mcp.servers", folder: Path | None = None
) -> dict[str, Mapping[str, Any]]:
    """Return name -> settings of the servers in a file with `mcpServers`, or in a mapping name -> settings.

    A command without a `cwd` runs in `folder`; if the servers come from a file, it runs in the file's folder.

    Raises:
        ConfigError: the file is missing, or a server's settings are invalid. Values are not shown; they may be secrets.
    """
    if isinstance(source, Path):
        where, servers, folder = str(source), _read_file(source), source.parent
    else:
        servers = dict(source)
    if not servers:
        raise ConfigError(f"{where}: there is no server; write {{name: {{command: …}}}} or {{name: {{url: …}}}}")
    return {name: _server(one, folder, who=f"{where}: the server {name!r}") for name, one in servers.items()}


def _server(settings: Any, folder: Path | None, *, who: str) -> dict[str, Any]:
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{who} must be a mapping with a command or a url, not a {type(settings).__name__}")
    server = McpServerSettings.read(settings, who=who).model_dump(exclude_none=True)
    return {"cwd": str(folder.resolve()), **server} if folder is not None and "command" in server else server


def _read_file(path: Path) -> dict[str, Any]:
    servers = read_resolved(path).get("mcpServers")
    if not isinstance(servers, Mapping) or not servers:
        raise ConfigError(f'{path}: write the servers as {{"mcpServers": {{"name": {{"command": …}} or {{"url": …}}}}}}')
    return dict(servers)


def list_tools(name: str, settings: Mapping[str, Any], *, timeout_s: float = 60.0) -> list[dict[str, Any]]:
    """Return the schema of every tool of a server, in OpenAI's format but otherwise as the server declares it.

    Raises:
        ConfigError: the server could not be reached after several tries or within `timeout_s` seconds.
    """
    words = StderrTail(secrets_of(settings))

    async def fetch() -> list[dict[str, Any]]:
        words.clear()
        async with make_client(settings, words=words) as client:
            return [OpenAIFunctionToolSchema.from_mcp(t).to_dict() for t in await _all_tools(client)]

    def again(problem: Exception) -> bool | float:
        is_final = isinstance(problem, ConfigError | TimeoutError | FileNotFoundError | PermissionError | NotADirectoryError)
        return not is_final and words.http_status not in (401, 403) and (START_PAUSE_S if "url" in settings else 0.1)

    async def fetch_in_time() -> list[dict[str, Any]]:
        tries, limit = 2 if "command" in settings else START_TRIES, asyncio.timeout(timeout_s)
        try:
            async with limit:
                return await retried(fetch, again=again, tries=tries, wait_s=START_PAUSE_S)
        except TimeoutError:
            if not limit.expired():
                raise
            raise ConnectionError(f"it did not list its tools within {timeout_s:g} s") from None

    try:
        tools: list[dict[str, Any]] = in_own_loop(fetch_in_time)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as problem:
        raise ConfigError(
            f"Failed to initialize MCP tools after maximum retries: server {name!r}: {reason(problem)}{words.note}; check "
            "its command or url, and that it runs"
        ) from problem
    return tools


async def _all_tools(client: Any) -> list[Any]:
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools
