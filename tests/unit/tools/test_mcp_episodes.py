"""Whole episodes over MCP and A2A: servers that die on the way, episodes that are cancelled, and nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from polyturn.core.generation import GenerateRequest
from polyturn.core.lifecycle import StopReason
from polyturn.core.trajectory import Trajectory
from polyturn.rollout.run_episode import run_episode
from polyturn.testing import check_interaction, check_tool
from polyturn.testing.episodes import scripted_context, task
from polyturn.tools.mcp import MCPBaseTool
from polyturn.tools.mcp_connection import McpLimits, McpServer

RAW = {"command": sys.executable, "args": ["-S", str(Path(__file__).with_name("mcp_raw_server.py"))]}
TYPED = {None, "connection", "timeout", "tool_error", "circuit_open"}


def calls(name: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {}})}</tool_call>"


def children() -> int:
    return sum(len(p.read_text().split()) for p in Path("/proc/self/task").glob("*/children"))


def tools_of(server: McpServer, *names: str) -> list[MCPBaseTool]:
    found = []
    for name in names:
        function = {"name": name, "description": name, "parameters": {"type": "object", "properties": {}}}
        tool = MCPBaseTool({"timeout": 0.5, "rate_limit": 1e6}, {"type": "function", "function": function})
        tool.connect(server)
        found.append(tool)
    return found


@pytest.mark.parametrize("session", ["run", "episode"])
async def test_no_server_that_dies_and_no_episode_that_is_cancelled_leaves_anything(
    session: Literal["run", "episode"],
) -> None:
    before = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd")), children()
    server = McpServer("s", RAW, session=session, limits=McpLimits(keep_s=0))
    choose = random.Random(session)

    def say(request: GenerateRequest) -> str:
        name = choose.choice(["count"] * 9 + ["pid", "noise", "hang", "quit", "", "", ""])
        return calls(name) if name else "#### 4"

    context = scripted_context(say, tools=tools_of(server, "count", "pid", "noise", "hang", "quit"))
    slots = asyncio.Semaphore(8)
    kinds: set[str | None] = set()

    async def one(number: int) -> None:
        async with slots:
            episode = asyncio.create_task(run_episode(context, task(), id=f"e{number}"))
            if number % 4 == 0:
                await asyncio.sleep(choose.random() * 0.3)
                episode.cancel()
            try:
                trajectory: Trajectory = await episode
            except asyncio.CancelledError:
                return
            assert trajectory.error is None, trajectory.error
            kinds.update(result.error for turn in trajectory.turns for result in turn.tool_results)

    async with asyncio.timeout(60):
        await asyncio.gather(*map(one, range(24)))
    assert {None, "connection"} <= kinds <= TYPED, kinds
    assert server._sessions == {} and context.tools.live_ids == set()
    for _ in range(300):
        after = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd")), children()
        if after == before:
            break
        await asyncio.sleep(0.01)
    assert after == before


async def test_they_keep_the_contracts_of_tools_and_interactions(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("common", "tool"):
        monkeypatch.setattr(f"polyturn.testing.suites.{place}.NUM_EPISODES", 4)  # each starts a process
    monkeypatch.setattr("polyturn.testing.suites.common.LONGEST_BLOCK_S", 5.0)  # which a busy machine holds up
    (tool,) = tools_of(McpServer("s", RAW, session="episode"), "count")
    await check_tool(tool, calls=[{}, {}, {}])
    pytest.importorskip("a2a", reason="pip install 'polyturn[a2a]'")
    from a2a_agent import served

    from polyturn.interactions.a2a import A2AInteraction
    from polyturn.tools.a2a import A2ATool

    with served() as (url, _):
        await check_tool(A2ATool({"url": url, "skill": "ask it"}), calls=[{"message": "talk"}, {"message": "book a flight"}])
        await check_interaction(A2AInteraction({"url": url, "name": "p"}), says=["talk", "talk more"])


async def test_an_agent_is_the_partner_of_an_episode_and_its_failure_is_not_the_models() -> None:
    pytest.importorskip("a2a", reason="pip install 'polyturn[a2a]'")
    from a2a_agent import served  # type: ignore[import-not-found]

    from polyturn.interactions.a2a import A2AInteraction

    with served() as (url, _):
        partner = A2AInteraction({"url": url, "timeout": 5})
        says: Any = ["talk of Rome", "talk of trains", "talk of nothing"]
        talked = await run_episode(
            scripted_context(says, interactions={"p": partner}), task(data_source=None, interaction="p"), id="a"
        )
        assert (talked.stop_reason, [t.score for t in talked.turns]) == (StopReason.ENV_DONE, [0.25, 0.5, 0.75])
        failed = await run_episode(
            scripted_context(["crash"], interactions={"p": partner}), task(data_source=None, interaction="p"), id="b"
        )
        assert failed.error is not None and "raised ToolError: the agent" in str(failed.error)
        assert partner.agent.num_users == 0
