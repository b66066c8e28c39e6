"""MCP servers that die, hang, freeze, flood or lie: no call hangs, nothing leaks, and the error says what happened."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from polyturn.core.errors import ConfigError, ToolError, ToolTimeoutError
from polyturn.tools.mcp_client import list_tools
from polyturn.tools.mcp_connection import McpLimits, McpServer
from polyturn.tools.mcp_content import text_of
from support.cases import each
from support.refusals import refuses, refuses_later
from support.tools_parts import Held, is_alive, until

pytestmark = pytest.mark.timeout(300)  # processes start, and a busy machine takes long to import what they need

SERVER = Path(__file__).with_name("mcp_sdk_server.py")
RAW = {"command": sys.executable, "args": ["-S", str(Path(__file__).with_name("mcp_raw_server.py"))]}
COMMAND = {"command": sys.executable, "args": [str(SERVER)]}
NEVER_READY = {"command": sys.executable, "args": ["-S", "-c", "import time; time.sleep(3600)"]}


def asker(server: McpServer, episode: str = "e") -> Callable[..., Coroutine[Any, Any, str]]:
    async def ask(tool: str, timeout_s: float = 50.0, **arguments: Any) -> str:
        result = await server.call(episode, tool, arguments, timeout_s=timeout_s)
        text = text_of(result.content)
        return f"error: {text}" if result.is_error else text

    return ask


async def test_pattern_in_an_output_schema_is_never_matched() -> None:
    server = McpServer("s", RAW, session="episode")
    server.open("e")
    assert await asker(server)("pattern") == "done"
    assert await asker(server)("listed") == "0", "the tools are not listed again during a run"
    await server.close("e")


async def test_misshapen_answer_fails_its_call_and_no_other() -> None:
    line = '{"jsonrpc": "2.0", "id": NUMBER, "result": {"content": [{"type": "picture"}]}}'
    server = McpServer("s", RAW, session="episode")
    server.open("e")
    ask = asker(server)
    with pytest.raises(ToolError):
        await ask("misshapen", timeout_s=3600.0, line=line)
    assert (await ask("pid")).isdigit(), "the connection goes on"
    await server.close("e")


async def test_flood_of_messages_leaves_the_event_loop_free(caplog: pytest.LogCaptureFixture) -> None:
    server = McpServer("s", RAW, session="episode")
    server.open("e")
    ask = asker(server)
    flood, num_turns = asyncio.create_task(ask("flood")), 0
    while not flood.done():
        num_turns += 1
        await asyncio.sleep(0)
    assert await flood == "done"
    assert num_turns > 5_000, "the event loop goes on between any two of the 5,000 lines"
    assert caplog.text.count("changed its list of tools") == 1
    with pytest.raises(ToolError) as refused:
        await ask("refuse")
    assert len(str(refused.value)) < 20_000, "of a message of 3 MB the beginning is quoted"
    await server.close("e")


async def test_server_killed_during_calls_is_started_again() -> None:
    held = Held()
    server = McpServer("s", RAW, session="episode")
    server.open("e")
    ask = asker(server)
    first = int(await ask("pid"))
    calls = [asyncio.create_task(ask("hang")) for _ in range(3)]
    await until(lambda: server.sessions["e"].num_calls == 3)
    os.kill(first, signal.SIGKILL)
    assert {type(p) for p in await asyncio.gather(*calls, return_exceptions=True)} == {ConnectionError}
    second = int(await ask("pid"))
    assert second != first
    assert await ask("noise") == "done"
    await refuses_later(lambda: ask("large", size=70_000_000), ConnectionError, "larger than max_answer_bytes")
    assert not is_alive(second)
    second = int(await ask("pid"))

    orphan = int(await ask("child"))
    os.kill(second, signal.SIGKILL)
    await until(lambda: server.sessions["e"].has_ended)
    await refuses_later(lambda: ask("count"), ConnectionError, "its state is lost")
    assert await ask("count") == "1", "the next call begins anew"
    await server.close("e")
    assert not is_alive(second)
    await until(lambda: not is_alive(orphan))
    await until(lambda: held.is_released)


async def test_episodes_own_server_ends_with_its_last_tool() -> None:
    held = Held()
    own = McpServer("own", RAW, session="episode")
    for name in "ab":
        own.open(name)
        own.open(name)  # two tools of the server
    a, b = asker(own, "a"), asker(own, "b")
    pids = {int(p) for p in await asyncio.gather(a("pid"), b("pid"))}
    assert len(pids) == 2 == own.num_connected
    assert [await a("count"), await a("count"), await b("count")] == ["1", "2", "1"]
    await own.close("a")
    assert own.num_connected == 2, "one tool is not released yet"
    await asyncio.gather(own.close("a"), own.close("b"))
    await own.close("b")
    assert own.num_connected == 0
    assert not any(map(is_alive, pids))
    await until(lambda: held.is_released)


async def test_late_and_cancelled_calls_are_cancelled_at_the_server() -> None:
    shared = McpServer("shared", COMMAND, limits=McpLimits(keep_s=3600))
    shared.open("a")
    ask = asker(shared, "a")
    pid = int(await ask("pid"))
    await refuses_later(lambda: ask("hang", timeout_s=0.5), ToolTimeoutError, "0.5 s")
    late = int((await ask("hung")).split()[0])  # 0 where the deadline passed before the server began
    calls = [asyncio.create_task(ask("hang", timeout_s=3600)) for _ in range(8)]
    while (await ask("hung")).split()[0] != str(late + 8):  # a quick call does not wait for slow ones
        pass
    for task in calls:
        task.cancel()
    assert {type(p) for p in await asyncio.gather(*calls, return_exceptions=True)} == {asyncio.CancelledError}
    while (await ask("hung")).split()[1] != str(late + 8):
        pass

    assert "the disk is full" in await ask("fail")
    assert "Unknown tool" in await ask("nowhere")
    assert (await ask("lie")).startswith("error: ")
    assert len(await ask("large", size=7_000_000)) == 7_000_000
    assert int(await ask("pid")) == pid, "none of this broke the connection"
    await shared.close("a")
    shared.open("b")
    assert int(await asker(shared, "b")("pid")) == pid, "the connection of a run is kept for the next episode"
    await shared.close("b")
    await shared.close_now()
    assert not is_alive(pid)


async def test_frozen_server_is_given_up_and_retried_after_a_pause(tmp_path: Path) -> None:
    marker, later_s = tmp_path / "dead", [0.0]
    server = McpServer(
        "s",
        {**RAW, "env": {"DEAD_IF": str(marker)}},
        limits=McpLimits(keep_s=0),
        clock=lambda: asyncio.get_running_loop().time() + later_s[0],
    )
    server.open("e")
    ask = asker(server)
    pid = int(await ask("pid"))
    marker.touch()  # from now on it cannot be started
    for tool in ("freeze", "pid", "pid"):
        with pytest.raises(ToolTimeoutError):
            await ask(tool, timeout_s=0.1)
    assert not is_alive(pid), "it is ended after three calls without an answer"
    await refuses_later(lambda: ask("pid"), ConnectionError, "licence expired | ask the vendor")
    tries, later_s[0] = server.sessions[""].num_failures, -3600.0
    for _ in range(20):
        with pytest.raises(ConnectionError, match=f"failed {tries} times in a row, last: .*licence expired"):
            await ask("pid")
    assert server.sessions[""].num_failures == tries, "no call waits for another try"
    marker.unlink()
    later_s[0] = 3600.0
    assert (await ask("pid")).isdigit()
    await server.close("e")


@pytest.mark.parametrize(("transport", "path"), each(2, [("streamable-http", "mcp"), ("sse", "sse")]))
async def test_server_behind_a_url_may_change_tools_and_restart(
    transport: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept_port = socket.socket()
    kept_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    kept_port.bind(("127.0.0.1", 0))  # no other process gets this port while the server is down
    port = kept_port.getsockname()[1]

    async def start() -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, str(SERVER), transport, str(port)], stdout=-1, stderr=asyncio.subprocess.DEVNULL
        )
        assert await process.stdout.readline() == b"listens\n"
        return process

    process = await start()
    held = Held()
    server = McpServer("web", {"url": f"http://127.0.0.1:{port}/{path}", "transport": transport}, session="episode")
    server.open("e")
    ask = asker(server)
    try:
        size = 900_000 if transport == "sse" else 7_000_000  # the SDK takes 1 MiB at once by SSE
        assert len(await ask("large", size=size)) == size
        assert await ask("learn") == "learnt"
        assert await ask("fresh") == "new"
        assert "Unknown tool: lie" in await ask("lie")
        await until(lambda: "changed its list of tools; the run keeps" in caplog.text)
        with pytest.raises(ToolTimeoutError):
            await ask("hang", timeout_s=0.1)
        call = asyncio.create_task(ask("hang"))
        await until(lambda: server.sessions["e"].num_calls == 1)
        process.kill()
        await process.wait()
        await refuses_later(lambda: call, ConnectionError, "'web'")
        await server.close("e")
        await until(lambda: held.is_released)
        process = await start()
        server.open("e")
        assert await ask("count") == "1"
    finally:
        await server.close("e")
        process.kill()
        await process.wait()
        kept_port.close()


async def test_server_that_is_never_ready_delays_no_other_session() -> None:
    held = Held()
    server = McpServer("deaf", NEVER_READY, session="episode", limits=McpLimits(connect_timeout_s=0.2))
    server.open("e")
    await refuses_later(lambda: asker(server)("pid"), ConnectionError, "handshake within 0.2 s")
    await server.close("e")
    patient = McpServer("deaf", NEVER_READY, session="episode")
    for name in "abc":
        patient.open(name)
    calls = [asyncio.create_task(asker(patient, name)("pid")) for name in "abc"]
    await until(lambda: patient.num_connected == 3)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, *(patient.close(name) for name in "abc"), return_exceptions=True)
    assert {c.cancelled() for c in calls} == {True}
    await until(lambda: held.is_released)


async def test_server_that_does_not_confirm_the_end_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyturn.tools.mcp_connection.CLOSE_S", 0.2)
    farewell, over = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.method == "DELETE":
            farewell.set()
            await over.wait()
        asked = await request.json() if request.method == "POST" else {}
        if asked.get("id") is None:
            return web.Response(status=405 if request.method == "GET" else 202)
        result: dict[str, Any] = {"content": [{"type": "text", "text": "done"}], "tools": []}
        if asked["method"] == "initialize":
            version = asked["params"]["protocolVersion"]
            result = {"protocolVersion": version, "capabilities": {}, "serverInfo": {"name": "s", "version": "1"}}
        reply = {"jsonrpc": "2.0", "id": asked["id"], "result": result}
        return web.json_response(reply, headers={"Mcp-Session-Id": "s"})

    app = web.Application()
    app.router.add_route("*", "/mcp", answer)
    async with TestServer(app) as rude:
        server = McpServer("rude", {"url": str(rude.make_url("/mcp"))}, session="episode")
        server.open("e")
        assert await asker(server)("any") == "done"
        await server.close("e")
        assert farewell.is_set()
        assert server.num_connected == 0
        over.set()


def test_server_that_cannot_list_its_tools_is_a_config_error() -> None:
    ends = {"command": sys.executable, "args": ["-S", "-c", "import sys; sys.exit('no key: set API_KEY')"]}
    refuses(lambda: list_tools("ends", ends), ConfigError, "'ends'", "no key: set API_KEY")
    refuses(lambda: list_tools("silent", NEVER_READY, timeout_s=0.5), ConfigError, "'silent'", "within 0.5 s")
