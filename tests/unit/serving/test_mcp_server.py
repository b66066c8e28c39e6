"""Tools served over MCP to the SDK's client: each session is an episode."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.server import MCPServer
from typer.testing import CliRunner

from polyturn import tool
from polyturn.cli.main import app as command_line
from polyturn.core.errors import ConfigError, ToolError
from polyturn.serving.auth import ServerRules, guarded
from polyturn.serving.listen import http_config
from polyturn.serving.mcp import ToolServer
from polyturn.tools.base import BaseTool
from polyturn.tools.mcp_client import list_tools
from polyturn.tools.mcp_connection import McpServer
from polyturn.tools.python_sandbox import PythonSandbox
from polyturn.tools.schema import ToolResponse
from polyturn.tools.toolbox import Toolbox
from support.isolated import need_isolation
from support.refusals import refuses_later
from support.tools_parts import until

pytestmark = pytest.mark.timeout(300)  # processes start, and a busy machine takes long to import what they need

DOT = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"


class Counter(BaseTool):
    """Counts within an episode, and keeps books of its instances."""

    def __init__(self) -> None:
        function = {"name": "count", "description": "Count.", "parameters": {"type": "object", "properties": {}}}
        super().__init__({}, {"type": "function", "function": function})
        self.live: dict[str, int] = {}
        self.events: list[str] = []

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        self.live[str(instance_id)] = 0
        self.events.append("create")
        return str(instance_id)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        self.live[instance_id] += 1
        return str(self.live[instance_id])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.live[instance_id]
        self.events.append("release")


@tool
async def draw(width: int, height: int = 1) -> ToolResponse:
    """Draw a picture.

    Args:
        width: In pixels.
        height: In pixels.
    """
    if width < 0:
        raise ToolError("a width is not negative")
    await asyncio.sleep(3600 if width > 9000 else 0)
    return ToolResponse(text=f"{width} x {height}", image=[DOT])


@asynccontextmanager
async def listening(application: Any, token: str | None = None) -> AsyncIterator[str]:
    """Serve an application; gives its address."""
    rules = ServerRules(token=token)
    guarded(application, rules)
    bound = socket.create_server(("127.0.0.1", 0))  # a client that asks before it is served waits
    server = uvicorn.Server(http_config(application, rules, lifespan="on", timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def served(box: Toolbox, *, token: str | None = None, idle_s: float = 60.0) -> AsyncIterator[tuple[str, ToolServer]]:
    tools = ToolServer(box)
    async with listening(tools.http_app(idle_s=idle_s, max_sessions=8, max_body_bytes=1 << 20), token) as url:
        yield f"{url}/mcp", tools


async def texts(client: Client, name: str, **arguments: Any) -> tuple[str, bool]:
    result = await client.call_tool(name, arguments)
    return " ".join(block.text for block in result.content if block.type == "text"), result.is_error


async def test_session_over_http_is_an_episode() -> None:
    counter = Counter()
    async with served(Toolbox([counter, draw])) as (url, server):
        async with Client(url) as one, Client(url) as other:
            listed = {t.name: t for t in (await one.list_tools()).tools}
            assert listed["draw"].input_schema["properties"]["height"] == {"type": "integer", "description": "In pixels."}
            assert counter.events == [], "an episode begins with its first call"
            assert [await texts(one, "count"), await texts(one, "count")] == [("1", False), ("2", False)]
            assert await texts(other, "count") == ("1", False)
            assert server.num_live == len(counter.live) == 2
            picture = await one.call_tool("draw", {"width": 3})
            assert [(b.type) for b in picture.content] == ["image", "text"]
            assert picture.content[0].data == DOT.partition(",")[2]  # type: ignore[union-attr]
            assert await texts(one, "draw", width=-1) == ("Error (tool_error): a width is not negative", True)
            assert "Error (schema): 'width' must be an integer" in (await texts(one, "draw", width="wide"))[0]
            assert "Error (unknown_tool): there is no tool 'paint'" in (await texts(one, "paint"))[0]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await one.call_tool("draw", {"width": 9001})
            assert await texts(one, "count") == ("3", False)
        await until(lambda: not counter.live)
    assert counter.events == ["create", "create", "release", "release"] and server.num_live == 0


async def test_server_of_the_older_transport_is_sent_the_token() -> None:
    old = MCPServer("old")
    old.add_tool(lambda: "found", name="find", description="Find.")
    async with listening(old.sse_app(), "secret-token") as origin:
        url = f"{origin}/sse"
        with pytest.raises(ConfigError, match="HTTP 401; give auth_token"):
            await asyncio.to_thread(list_tools, "old", {"url": url, "auth_token": "wrong-token"})
        settings = {"url": url, "auth_token": "secret-token"}
        assert [s["function"]["name"] for s in await asyncio.to_thread(list_tools, "old", settings)] == ["find"]
        asked = McpServer("old", settings, session="episode")
        asked.open("e")
        assert (await asked.call("e", "find", {}, timeout_s=50)).content[0].text == "found"
        await asked.close("e")


async def test_python_sandbox_keeps_variables_within_a_session() -> None:
    need_isolation()
    sandbox = PythonSandbox({"warm": 0, "timeout": 50})
    async with served(Toolbox([sandbox])) as (url, _), Client(url) as one, Client(url) as other:
        assert "printed nothing" in (await texts(one, "python", code="x = 6 * 7"))[0]
        assert (await texts(one, "python", code="x"))[0].strip() == "42"
        assert "NameError" in (await texts(other, "python", code="x"))[0]


@pytest.mark.clock  # the session must not be silent for 0.3 s before its first call
async def test_silent_session_is_ended() -> None:
    counter = Counter()
    async with served(Toolbox([counter]), idle_s=0.3) as (url, _):
        quiet = Client(streamable_http_client(url, terminate_on_close=False), mode="legacy")
        async with quiet:
            assert await texts(quiet, "count") == ("1", False)
        await until(lambda: not counter.live)


async def test_session_that_the_server_forgot_is_begun_again() -> None:
    counter = Counter()
    async with served(Toolbox([counter])) as (url, tools):
        own, shared = McpServer("own", {"url": url}, session="episode"), McpServer("all", {"url": url})
        for server in (own, shared):
            server.open("e")
            await server.call("e", "count", {}, timeout_s=50)
        for session in list(tools.server.session_manager._server_instances.values()):
            await session.terminate()
        with pytest.raises(ConnectionError, match="ended since the last call, and its state is lost"):
            await own.call("e", "count", {}, timeout_s=50)
        for server in (own, shared):
            assert (await server.call("e", "count", {}, timeout_s=50)).content[0].text == "1", "begun again"
            await server.close("e")
            await server.close_now()


async def test_token_is_demanded_of_clients() -> None:
    import httpx2

    async with served(Toolbox([draw]), token="secret") as (url, _):
        await refuses_later(lambda: asyncio.to_thread(list_tools, "ours", {"url": url}), ConfigError, "HTTP 401")
        found = await asyncio.to_thread(list_tools, "ours", {"url": url, "auth_token": "secret"})
        assert found == [draw.schema]
        async with (
            httpx2.AsyncClient(headers={"Authorization": "Bearer secret"}) as http,
            Client(streamable_http_client(url, http_client=http)) as client,
        ):
            assert (await texts(client, "draw", width=2))[0] == "2 x 1"


async def test_command_serves_a_tool_file_over_stdio(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import polyturn\n\n@polyturn.tool\ndef add(a: int, b: int) -> int:\n"
        '    """Add.\n\n    Args:\n        a: One.\n        b: Other.\n    """\n    print("noise")\n    return a + b\n'
    )
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: 'mine.py:add', config: {type: native}}]\n")
    arguments = ["-c", "from polyturn.cli.main import main; main()", "serve", "--stdio", "--mcp"]
    command = StdioServerParameters(command=sys.executable, args=[*arguments, "tools.yaml"], cwd=tmp_path)
    async with Client(command) as client:
        assert [t.name for t in (await client.list_tools()).tools] == ["add"]
        assert await texts(client, "add", a=2, b=3) == ("5", False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--stdio"], "--stdio works only with --mcp"), (["--mcp", "none.yaml"], "has no tool to serve")],
)
def test_options_that_do_not_go_together_are_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "none.yaml").write_text("tools: []\n")
    given = [str(tmp_path / a) if a.endswith(".yaml") else a for a in arguments]
    refused = CliRunner().invoke(command_line, ["serve", *given])
    assert isinstance(refused.exception, ConfigError)
    assert message in str(refused.exception)
