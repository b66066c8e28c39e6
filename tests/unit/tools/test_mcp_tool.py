"""Tools of an MCP server, from a tool file, against real servers."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from polyturn.core.errors import ConfigError
from polyturn.core.messages import ToolCall
from polyturn.core.task import Task
from polyturn.engines.virtual_time import run_virtual
from polyturn.tools.executor import ToolBox
from polyturn.tools.mcp import MCPSearchTool, Pace
from polyturn.tools.registry import initialize_tools_from_config
from support.cases import each

SERVER = Path(__file__).with_name("mcp_server.py")


def tool_file(folder: Path, **servers: Any) -> Any:
    known = servers or {"demo": {"command": sys.executable, "args": [str(SERVER)]}}
    (folder / "servers.json").write_text(json.dumps({"mcpServers": known}))

    def item(name: str, *selected: str, **config: Any) -> dict[str, Any]:
        mcp = {"mcp_servers_config_path": "servers.json", "tool_selected_list": list(selected)}
        return {"class_name": f"polyturn.tools.mcp.{name}", "config": {"type": "mcp", **config}, "mcp": mcp}

    return item


async def test_a_servers_tools_are_called_and_its_failures_told_apart(tmp_path: Path) -> None:
    item = tool_file(tmp_path)
    quick = item("MCPSearchTool", "add", "fail", "die", "search", timeout=120.0)
    tools = initialize_tools_from_config({"tools": [quick, item("MCPSearchTool", "sleep", timeout=0.5)]}, base=tmp_path)
    assert [t.name for t in tools] == ["add", "fail", "die", "search", "sleep"]
    assert {type(t) for t in tools} == {MCPSearchTool}
    box = ToolBox(tools)
    tags = box.schemas["add"]["function"]["parameters"]["properties"]["tags"]
    assert tags["anyOf"] == [{"items": {"type": "string"}, "type": "array"}, {"type": "null"}]

    async with box.session("e") as session:
        await session.start(Task(id="t", prompt=()))

        async def ask(name: str, **arguments: Any) -> tuple[Any, str | None, dict[str, Any]]:
            (result,) = await session.call([ToolCall(id="c", name=name, arguments=arguments)])
            return result.content, result.error, dict(result.metrics)

        assert (await ask("add", a=1, b=4))[:2] == ("5", None)
        text, error, metrics = await ask("search", query="rome")
        assert (error, metrics["status"], metrics["total_results"]) == (None, "success", 2)
        text, error, _ = await ask("fail")
        assert error == "tool_error" and "Tool call failed: Error executing tool fail" in text
        text, error, _ = await ask("sleep", seconds=3600)
        assert error == "timeout" and "Tool call failed: no answer within 0.5 s" in text
        text, error, _ = await ask("die")
        assert error == "connection" and "Connection failed: MCP server 'demo'" in text
        assert (await ask("add", a=2))[:2] == ("4", None), "the server is started again"
        assert set((await session.finish()).values()) == {None}
    assert all(t._instance_dict == {} for t in tools)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("transport", "path"), each(2, [("streamable-http", "mcp"), ("sse", "sse")]))
async def test_a_server_may_be_reached_over_http_with_a_token(tmp_path: Path, transport: str, path: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(SERVER), transport, str(port)]
    server = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    try:
        item = tool_file(
            tmp_path, demo={"url": f"http://127.0.0.1:{port}/{path}", "auth_token": "secret", "transport": transport}
        )
        tools = initialize_tools_from_config({"tools": [item("MCPBaseTool", "add", timeout=120.0)]}, base=tmp_path)
        async with ToolBox(tools).session("e") as session:
            await session.start(Task(id="t", prompt=()))
            (result,) = await session.call([ToolCall(id="c", name="add", arguments={"a": 1, "b": 4})])
        assert (result.content, result.error) == ("5", None)
    finally:
        server.kill()
        await server.wait()


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    item = tool_file(tmp_path, lost={"command": "no-such-command-anywhere"})
    with pytest.raises(ConfigError, match="Failed to initialize MCP tools after maximum retries: server 'lost'"):
        initialize_tools_from_config({"tools": [item("MCPBaseTool")]}, base=tmp_path)
    item = tool_file(tmp_path, odd={"command": "x", "url": "http://y"})
    with pytest.raises(ConfigError, match="needs either a command or a url"):
        initialize_tools_from_config({"tools": [item("MCPBaseTool")]}, base=tmp_path)
    with pytest.raises(ConfigError, match=r"needs mcp: .mcp_servers_config_path"):
        initialize_tools_from_config({"tools": [{**item("MCPBaseTool"), "mcp": None}]})
    wrong = {**item("MCPBaseTool"), "class_name": "polyturn.tools.gsm8k.Gsm8kTool"}
    with pytest.raises(ConfigError, match="must inherit"):
        initialize_tools_from_config({"tools": [wrong]}, base=tmp_path)
    with pytest.raises(ConfigError, match="there is no file"):
        initialize_tools_from_config({"tools": [item("MCPBaseTool")]}, base=tmp_path / "elsewhere")


def test_calls_are_let_through_evenly() -> None:
    async def let_through() -> list[float]:
        pace, at = Pace(4), []
        for _ in range(4):
            await pace.wait()
            at.append(asyncio.get_running_loop().time())
        return at

    assert run_virtual(let_through()) == [0.0, 0.25, 0.5, 0.75]
