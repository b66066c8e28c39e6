"""Tools of an MCP server, from a tool file to whole episodes, against real servers."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from polyturn.core.generation import GenerateRequest
from polyturn.core.messages import ToolCall
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory
from polyturn.rollout.run_episode import run_episode
from polyturn.testing import check_tool
from polyturn.testing.episodes import scripted_context, task
from polyturn.tools.episode_tools import EpisodeTools
from polyturn.tools.mcp import MCPBaseTool, MCPSearchTool
from polyturn.tools.mcp_connection import McpLimits, McpServer
from polyturn.tools.registry import initialize_tools_from_config
from polyturn.tools.toolbox import Toolbox
from support.tools_parts import Held, until

pytestmark = pytest.mark.timeout(300)  # processes start, and a busy machine takes long to import what they need

SERVER = Path(__file__).with_name("mcp_sdk_server.py")
RAW = {"command": sys.executable, "args": ["-S", str(Path(__file__).with_name("mcp_raw_server.py"))]}
FAILURES = {None, "connection", "timeout", "tool_error", "circuit_open"}


async def test_tools_of_a_server_are_called_and_failures_told_apart(tmp_path: Path) -> None:
    servers = {"demo": {"command": sys.executable, "args": [str(SERVER)]}}
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": servers}))

    item = {
        "class_name": "polyturn.tools.mcp.MCPSearchTool",
        "config": {"type": "mcp", "timeout": 50},
        "mcp": {"mcp_servers_config_path": "servers.json", "tool_selected_list": ["add", "fail", "die", "search"]},
    }
    tools = initialize_tools_from_config({"tools": [item]}, base=tmp_path)
    assert [t.name for t in tools] == ["add", "fail", "search", "die"]
    assert {type(t) for t in tools} == {MCPSearchTool}
    box = Toolbox(tools)
    tags = box.schemas["add"]["function"]["parameters"]["properties"]["tags"]
    assert tags["anyOf"] == [{"items": {"type": "string"}, "type": "array"}, {"type": "null"}]
    async with EpisodeTools(box, "e") as session:
        await session.start(Task(id="t", prompt=()))

        async def ask(name: str, **arguments: Any) -> Any:
            (result,) = await session.call([ToolCall(id="c", name=name, arguments=arguments)])
            return result

        assert (await ask("add", a=1, b=4)).content == "5"
        found = await ask("search", query="rome")
        assert (found.error, found.metrics["status"], found.metrics["total_results"]) == (None, "success", 2)
        refused = await ask("fail")
        assert (refused.error, "the disk is full" in refused.content) == ("tool_error", True)
        assert (await ask("die")).error == "connection"
        assert (await ask("add", a=2)).content == "4", "the server is started again"
        assert set((await session.finish()).values()) == {None}


def raw_tools(server: McpServer, *names: str) -> list[MCPBaseTool]:
    tools = []
    for name in names:
        function = {"name": name, "description": name, "parameters": {"type": "object", "properties": {}}}
        config = {"timeout": 0.5 if name == "hang" else 50, "rate_limit": 1e6}
        tool = MCPBaseTool(config, {"type": "function", "function": function})
        tool.connect(server)
        tools.append(tool)
    return tools


@pytest.mark.parametrize("session", ["run", "episode"])
async def test_dying_servers_and_cancelled_episodes_leave_nothing(session: Literal["run", "episode"]) -> None:
    held = Held()
    server = McpServer("s", RAW, session=session, limits=McpLimits(keep_s=0))

    def say(request: GenerateRequest) -> str:
        name = random.Random(request.request_id).choice(["count"] * 9 + ["pid", "noise", "hang", "quit", "", "", ""])
        return f"<tool_call>{json.dumps({'name': name, 'arguments': {}})}</tool_call>" if name else "#### 4"

    context = scripted_context(say, tools=raw_tools(server, "count", "pid", "noise", "hang", "quit"), tool_timeout_s=60.0)
    slots = asyncio.Semaphore(8)
    kinds: set[str | None] = set()

    async def one(number: int) -> None:
        async with slots:
            episode = asyncio.create_task(run_episode(context, task(), id=f"e{number}"))
            if number % 4 == 0:
                await asyncio.sleep(number / 100)
                episode.cancel()
            try:
                trajectory: Trajectory = await episode
            except asyncio.CancelledError:
                return
            assert trajectory.error is None, trajectory.error
            kinds.update(result.error for turn in trajectory.turns for result in turn.tool_results)

    await asyncio.gather(*map(one, range(24)))
    assert {None, "connection"} <= kinds <= FAILURES, kinds
    assert not server.sessions
    assert context.tools.live_ids == set()
    await until(lambda: held.is_released)


async def test_mcp_tool_keeps_the_contract_of_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("common", "tool"):
        monkeypatch.setattr(f"polyturn.testing.suites.{module}.NUM_EPISODES", 4)  # each starts a process
    monkeypatch.setattr("polyturn.testing.suites.common.LONGEST_BLOCK_S", 50.0)  # a busy machine holds the loop up
    (tool,) = raw_tools(McpServer("s", RAW, session="episode"), "count")
    await check_tool(tool, calls=[{}, {}, {}])
