"""The surfaces of fuzz.py with a peer: our MCP server, hostile MCP servers, and the desk.

    mcp_server    damaged requests to `polyturn serve --mcp`, over HTTP and over standard input
    mcp_stdio     an MCP server, a process, that writes damaged lines: no JSON, wrong ids, deep nesting, half a message
    mcp_http      the same behind a URL: damaged bodies, event streams, statuses
    desk          requests to the desk's page, papers and answers in its folder, typed lines

Whatever a peer sends, our call must end with a result of a documented kind. The kind `exception` means a bug of ours, so it
fails the case. After damaged requests our server must answer a right one.
"""

# ruff: noqa: E501
from __future__ import annotations

import asyncio
import base64
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import _fuzz_tools
from _corruption import a_text, as_json, damaged, damaged_bytes

from polyturn.core.errors import ConfigError
from polyturn.core.messages import ToolCall
from polyturn.core.task import Task
from polyturn.tools.episode_tools import EpisodeTools
from polyturn.tools.options import ToolOptions
from polyturn.tools.toolbox import Toolbox

Case = Callable[[random.Random], Awaitable[None]]
AskSocket = Callable[[int, bytes], Awaitable[int]]
Check = Callable[[int], None]

SERVER = Path(__file__).with_name("_fuzz_mcp_server.py")
PATIENCE_S = 0.1
"""Seconds that a call waits for a peer that does not answer."""
SILENT = 0.02
"""Share of the calls that a peer never answers."""
KINDS = (None, "tool_error", "connection", "timeout", "too_large", "circuit_open")


CAME: Counter[str] = Counter()
"""Kind of the result -> number of calls to hostile peers."""


class Broken(Exception):
    """A surface broke its contract."""


async def call(box: Toolbox, tool: str, arguments: Mapping[str, Any]) -> None:
    """Call a tool in a new episode and check the result."""
    (result,) = [r async for r in _called(box, tool, arguments)]
    CAME[result.error or "answered"] += 1
    is_odd = result.error == "exception" and "DataError" in str(result.content)  # not a valid image
    if result.error not in KINDS and not is_odd:
        raise Broken(f"{result.error}: {str(result.content)[:300]}")
    json.dumps(result.content if isinstance(result.content, str) else list(result.content))


async def _called(box: Toolbox, tool: str, arguments: Mapping[str, Any]) -> AsyncIterator[Any]:
    async with EpisodeTools(box, f"e-{time.monotonic_ns()}") as session:
        await session.start(Task(id="t", prompt=()))
        for result in await session.call([ToolCall(id="c", name=tool, arguments=dict(arguments))]):
            yield result


# --- messages ----------------------------------------------------------------------------------------------------------------

DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
"""A picture."""
CALLED: dict[str, Any] = {
    "jsonrpc": "2.0",
    "id": "@ID@",
    "result": {
        "content": [
            {"type": "text", "text": "4", "annotations": {"audience": ["user"]}},
            {"type": "image", "data": DOT, "mimeType": "image/png"},
            {"type": "resource", "resource": {"uri": "file:///a", "text": "b", "mimeType": "text/plain"}},
            {"type": "resource_link", "uri": "file:///a", "name": "a"},
        ],
        "structuredContent": {"answer": 4},
        "isError": False,
    },
}
REFUSED = {"jsonrpc": "2.0", "id": "@ID@", "error": {"code": -32602, "message": "no", "data": {"a": 1}}}
TOLD = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x", "logger": "l"}}
ASKED = {"jsonrpc": "2.0", "id": 7, "method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 3}}
PROGRESS = {"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": 1, "progress": 0.5}}
CHANGED = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}
OF_PEERS = (CALLED, CALLED, CALLED, REFUSED, TOLD, ASKED, PROGRESS, CHANGED)


def peer_bytes(rng: random.Random) -> bytes:
    """Return one or several damaged messages of a hostile peer; `@ID@` stands for the request's id."""
    lines = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        value = damaged(rng.choice(OF_PEERS), rng) if rng.random() < 0.9 else [damaged(CALLED, rng), CALLED]
        line = as_json(value, rng).replace(b'"@ID@"', b"@ID@" if rng.random() < 0.8 else b"99999")
        lines.append(damaged_bytes(line, rng) if rng.random() < 0.3 else line)
    return rng.choice((b"\n", b"\n", b"\r\n", b"")).join(lines)


INITIALIZE: dict[str, Any] = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}},
}
REQUESTS: tuple[dict[str, Any], ...] = (
    INITIALIZE,
    {"jsonrpc": "2.0", "method": "notifications/initialized"},
    {"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": {"cursor": "x"}},
    *[
        {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {"name": "add", "arguments": {"a": 1, "b": 2}}},
    ]
    * 3,
    {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 3, "reason": "x"}},
    {"jsonrpc": "2.0", "id": 4, "method": "ping"},
    {"jsonrpc": "2.0", "id": 5, "method": "resources/read", "params": {"uri": "file:///etc/passwd"}},
)


# --- our server of tools --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def mcp_server(ask_socket: AskSocket, check: Check) -> AsyncIterator[Case]:
    """Yield the cases of our MCP server."""
    import uvicorn

    from polyturn.serving.auth import ServerRules, guarded
    from polyturn.serving.listen import bind, http_config
    from polyturn.serving.mcp import ToolServer

    tools = ToolServer(Toolbox([_fuzz_tools.add], ToolOptions(timeout_s=5.0, max_result_chars=None)))
    rules = ServerRules(max_body_bytes=1 << 20)
    app = tools.http_app(idle_s=60.0, max_sessions=1 << 20, max_body_bytes=1 << 20)
    guarded(app, rules)
    bound = bind("127.0.0.1", 0)
    port = bound.getsockname()[1]
    server = uvicorn.Server(http_config(app, rules, lifespan="on"))
    running = asyncio.create_task(server.serve(sockets=[bound]))
    while not server.started and not running.done():  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.01)

    async def session() -> str:
        reading, writing = await asyncio.open_connection("127.0.0.1", port)
        try:
            writing.write(_post(json.dumps(INITIALIZE).encode(), ""))
            head = await reading.readuntil(b"\r\n\r\n")
        finally:
            writing.close()
        headers = [line for line in head.split(b"\r\n") if line.lower().startswith(b"mcp-session-id:")]
        if not headers:
            raise Broken(f"a right `initialize` was answered {head[:200]!r}")
        return headers[0].partition(b":")[2].strip().decode()

    live: list[str] = []

    async def case(rng: random.Random) -> None:
        if not live or rng.random() < 0.02:  # a new client; the server must accept it after anything that others sent
            live[:] = [await session()]
        wrong = "".join(c for c in a_text(rng)[:40] if c.isascii() and c.isprintable())
        body = as_json(damaged(rng.choice(REQUESTS), rng), rng)
        body = damaged_bytes(body, rng) if rng.random() < 0.2 else body
        check(await ask_socket(port, _post(body, rng.choice(("", wrong)) if rng.random() < 0.1 else live[0])))

    try:
        yield case
    finally:
        server.should_exit = True
        await running


def _post(body: bytes, session: str) -> bytes:
    lines = [
        "POST /mcp HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        "Accept: application/json, text/event-stream",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *([f"Mcp-Session-Id: {session}"] if session else []),
    ]
    return "\r\n".join(lines).encode("ascii", "replace") + b"\r\n\r\n" + body


class OnStdin:
    """A process of `polyturn serve --mcp FILE --stdio`, which must answer a right request after any damaged ones."""

    def __init__(self, folder: Path) -> None:
        self._file = Path(_fuzz_tools.__file__)
        self._process: asyncio.subprocess.Process | None = None
        self._number = 1000

    async def case(self, rng: random.Random) -> None:
        """Write damaged lines, then a ping; read until the ping is answered."""
        process = self._process or await self._start()
        assert process.stdin is not None and process.stdout is not None
        lines = [as_json(damaged(rng.choice(REQUESTS[1:]), rng), rng) for _ in range(rng.choice((1, 1, 3)))]
        lines = [damaged_bytes(line, rng) if rng.random() < 0.3 else line for line in lines]
        self._number += 1
        ping = {"jsonrpc": "2.0", "id": self._number, "method": "ping"}
        try:
            process.stdin.write(b"\n".join(lines) + b"\n" + json.dumps(ping).encode() + b"\n")
            await process.stdin.drain()
            while line := await process.stdout.readline():
                read = json.loads(line)
                if isinstance(read, dict) and read.get("id") == self._number:
                    return
        except (BrokenPipeError, ConnectionResetError):
            pass
        self._process = None
        raise Broken(f"the server on standard input ended with {await process.wait()} at {lines!r:.300}")

    async def close(self) -> None:
        """End it."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        code = "from polyturn.cli.main import main; main()"
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, "serve", "--mcp", str(self._file), "--stdio",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, limit=1 << 24,
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        self._process.stdin.write(json.dumps(INITIALIZE).encode() + b"\n")
        await self._process.stdout.readline()
        self._process.stdin.write(json.dumps(ready).encode() + b"\n")
        return self._process


# --- hostile peers ----------------------------------------------------------------------------------------------------------------


PROPERTIES = {"say": {"type": "string"}, "is_whole": {"type": "boolean"}}


def mcp_box(settings: Mapping[str, Any], *, session: str) -> tuple[Toolbox, Any]:
    """Return a run's tools with one hostile server, and the server."""
    from polyturn.tools.breaker import BreakerSettings
    from polyturn.tools.mcp import MCPBaseTool
    from polyturn.tools.mcp_connection import McpLimits, McpServer

    schema = {"type": "function", "function": {"name": "ask", "parameters": {"type": "object", "properties": PROPERTIES}}}
    tool = MCPBaseTool({"type": "mcp", "timeout": PATIENCE_S, "rate_limit": 1e6}, schema)
    limits = McpLimits(max_answer_bytes=1 << 16, keep_s=0.0 if session == "episode" else 60.0)
    server = McpServer("hostile", settings, session=session, limits=limits)  # type: ignore[arg-type]
    tool.connect(server)
    return Toolbox([tool], ToolOptions(timeout_s=10.0, breaker=BreakerSettings(failures=0))), server


@asynccontextmanager
async def mcp_stdio() -> AsyncIterator[Case]:
    """Yield the cases of a server in a process."""
    box, server = mcp_box({"command": sys.executable, "args": ["-S", str(SERVER)]}, session="run")

    async def case(rng: random.Random) -> None:
        say = peer_bytes(rng)
        if rng.random() < 0.01:
            say = b"x" * (1 << 17)  # a line that is too long to be an answer
        arguments = {"say": base64.b64encode(say).decode(), "is_whole": rng.random() > SILENT}
        await call(box, "ask", arguments)

    try:
        yield case
    finally:
        await server.close_now()


class HostilePeer:
    """An HTTP server that answers each POST with the next prepared bytes, and a GET with its document."""

    def __init__(self) -> None:
        self.next: tuple[int, str, bytes] | None = None
        """Status, content type and body of the answer to the next POST that is not a handshake."""
        self.document = b"{}"
        self.port = 0

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[HostilePeer]:
        """Listen on a free port."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reading: asyncio.StreamReader, writing: asyncio.StreamWriter) -> None:
        try:
            while head := await reading.readuntil(b"\r\n\r\n"):
                method = head.split(b" ", 1)[0]
                length = next(
                    (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")),
                    0,
                )
                body = await reading.readexactly(length)
                status, kind, answer = self._answer(method, body)
                more = f"Mcp-Session-Id: s\r\nContent-Type: {kind}\r\nContent-Length: {len(answer)}\r\n\r\n"
                writing.write(f"HTTP/1.1 {status} X\r\n{more}".encode() + answer)
                await writing.drain()
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            pass
        finally:
            writing.close()

    def _answer(self, method: bytes, body: bytes) -> tuple[int, str, bytes]:
        if method == b"GET":
            return (200, "application/json", self.document) if self.document else (405, "text/plain", b"")
        if method != b"POST":
            return 200, "text/plain", b""
        request = json.loads(body)
        number = request.get("id")
        if request.get("method") == "initialize":
            server = {"name": "hostile", "version": "1"}
            version = request["params"]["protocolVersion"]
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
            return 200, "application/json", json.dumps({"jsonrpc": "2.0", "id": number, "result": result}).encode()
        if request.get("method") == "tools/list":
            result = {"tools": [{"name": "ask", "inputSchema": {"type": "object"}}]}
            return 200, "application/json", json.dumps({"jsonrpc": "2.0", "id": number, "result": result}).encode()
        if number is None:
            return 202, "text/plain", b""
        if self.next is None or request.get("method") not in ("tools/call", "SendMessage", "SendStreamingMessage"):
            error = {"code": -32601, "message": "Method not found"}
            return 200, "application/json", json.dumps({"jsonrpc": "2.0", "id": number, "error": error}).encode()
        status, kind, answer = self.next
        return status, kind, answer.replace(b"@ID@", json.dumps(number).encode())


STATUSES = (202, 204, 400, 401, 404, 429, 500, 503)
JSON, STREAM = "application/json", "text/event-stream"
TYPES = (JSON, STREAM, "text/html", "", "application/json; charset=utf-16")


def http_answer(rng: random.Random, message: bytes, *, expected: str) -> tuple[int, str, bytes]:
    """Return an HTTP answer with a message, sometimes with an unexpected type or status."""
    kind = expected if rng.random() < 0.9 else rng.choice(TYPES)
    if kind == STREAM:
        field = rng.choice((b"data", b"data", b"data", b"event: message\ndata", b"id: 1\nretry: x\ndata", b"dat"))
        message = b"".join(field + b": " + line + b"\n\n" for line in message.splitlines() or [b""])
        message = damaged_bytes(message, rng) if rng.random() < 0.2 else message
    return 200 if rng.random() < 0.95 else rng.choice(STATUSES), kind, message


@asynccontextmanager
async def mcp_http() -> AsyncIterator[Case]:
    """Yield the cases of a server at a URL."""
    async with HostilePeer().listening() as peer:
        peer.document = b""
        box, server = mcp_box({"url": f"http://127.0.0.1:{peer.port}/mcp"}, session="run")

        async def case(rng: random.Random) -> None:
            alone = as_json(damaged(CALLED, rng, times=1), rng).replace(b'"@ID@"', b"@ID@")
            say = alone if rng.random() < 0.6 else peer_bytes(rng)
            peer.next = http_answer(rng, say, expected=rng.choice((JSON, STREAM)))
            await call(box, "ask", {})

        try:
            yield case
        finally:
            await server.close_now()


# --- people ----------------------------------------------------------------------------------------------------------------------

PAPER: dict[str, Any] = {
    "ticket": "t", "about": {"goal": "Eat."}, "since": 1.0, "until": 4e9,
    "messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}],
}  # fmt: skip
GIVEN = {"ticket": "t", "text": "And for four?", "is_end": False, "score": 0.5}
TYPED = ("And for four?", "/end thanks", "/end 1 thanks", "/score 0.5 go on", "/help", "/score x", "/")


def desk(folder: Path, ask_asgi: Callable[..., Awaitable[int]], check: Check) -> Case:
    """Return the cases of the desk: its page, its folder, and typed lines."""
    from polyturn.interactions.person import HumanQueue, HumanReply, read_answer
    from polyturn.serving.auth import ServerRules
    from polyturn.viewer.app import create_app

    desk_folder = folder / "desk"
    queue = HumanQueue(desk_folder)
    app = create_app([], desk=queue, rules=ServerRules(max_body_bytes=1 << 20))

    def write(part: str, name: str, data: bytes) -> None:
        (desk_folder / part / f"{name}.json").write_bytes(data)

    def clear() -> None:
        for path in desk_folder.glob("*/*"):
            path.unlink()

    async def of_page(rng: random.Random) -> None:
        write("waiting", "t", json.dumps(PAPER).encode())
        body = as_json(damaged(GIVEN, rng), rng)
        body = damaged_bytes(body, rng) if rng.random() < 0.2 else body
        check(await ask_asgi(app, rng, "/api/answer", body, method="POST" if rng.random() < 0.95 else None))
        check(await ask_asgi(app, rng, "/api/waiting", b"", method="GET"))

    async def of_folder(rng: random.Random) -> None:
        paper = as_json(damaged(PAPER, rng), rng)
        write("waiting", "t", damaged_bytes(paper, rng) if rng.random() < 0.4 else paper)
        json.dumps(queue.waiting())
        check(await ask_asgi(app, rng, "/api/waiting", b"", method="GET"))

    async def of_answer(rng: random.Random) -> None:
        """Write a damaged answer; the conversation must ignore it and wait until its time is over."""
        file = as_json(damaged(GIVEN, rng), rng)
        file = damaged_bytes(file, rng) if rng.random() < 0.4 else file
        waiting = asyncio.create_task(queue.ask(PAPER["messages"], about=PAPER["about"], deadline_s=0.02))
        for _ in range(50):
            await asyncio.sleep(0.001)
            if paths := list((desk_folder / "waiting").glob("*.json")):
                write("answers", paths[0].stem, file)
                break
        answer = await waiting
        if answer is not None and not isinstance(answer, HumanReply):
            raise Broken(f"{answer!r:.100} is not an answer")

    async def of_line(rng: random.Random) -> None:
        line = rng.choice(TYPED)
        line = a_text(rng) if rng.random() < 0.3 else damaged_bytes(line.encode(), rng).decode("utf-8", "replace")
        json.dumps(read_answer(line).text)

    async def case(rng: random.Random) -> None:
        try:
            await rng.choice((of_page, of_page, of_folder, of_folder, of_line, of_line, of_answer))(rng)
        finally:
            clear()

    return case


@asynccontextmanager
async def services(
    folder: Path, *, ask_socket: AskSocket, ask_asgi: Callable[..., Awaitable[int]], check: Check
) -> AsyncIterator[dict[str, Case]]:
    """Yield all cases; print which are left out because their SDK is not installed."""
    cases: dict[str, Case] = {"desk": desk(folder, ask_asgi, check)}
    async with AsyncExitStack() as stack:
        try:
            on_stdin = OnStdin(folder)
            over_http = await stack.enter_async_context(mcp_server(ask_socket, check))
            stack.push_async_callback(on_stdin.close)

            async def of_server(rng: random.Random) -> None:
                await (on_stdin.case(rng) if rng.random() < 0.5 else over_http(rng))

            cases["mcp_server"] = of_server
            cases["mcp_stdio"] = await stack.enter_async_context(mcp_stdio())
            cases["mcp_http"] = await stack.enter_async_context(mcp_http())
        except (ModuleNotFoundError, ConfigError) as missing:
            print(f"MCP is left out: {missing}", file=sys.stderr)
        yield cases
