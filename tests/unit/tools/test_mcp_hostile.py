"""What an MCP server may do to a run: die, hang, freeze, flood, lie; nothing of it hangs, leaks or goes untold."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from polyturn.core.errors import ConfigError, ToolError, ToolTimeoutError
from polyturn.tools.failures import TooLargeError
from polyturn.tools.mcp_client import list_tools
from polyturn.tools.mcp_connection import McpLimits, McpServer
from polyturn.tools.mcp_content import text_of
from support.cases import each

SERVER = Path(__file__).with_name("mcp_hostile_server.py")
RAW = {"command": sys.executable, "args": ["-S", str(Path(__file__).with_name("mcp_raw_server.py"))]}
COMMAND = {"command": sys.executable, "args": [str(SERVER)]}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def held() -> tuple[int, int]:
    """Return how many file descriptors and tasks this process has."""
    return len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())


async def until(is_so: Callable[[], bool]) -> bool:
    for _ in range(10_000):
        if is_so():
            return True
        await asyncio.sleep(0.01)
    return False


async def underway(server: McpServer, count: int, *, key: str = "e") -> bool:
    """Wait until so many calls of a session wait for their answer."""
    return await until(lambda: len(server._sessions[key]._strays) == count)


def asker(server: McpServer, episode: str = "e") -> Callable[..., Coroutine[Any, Any, str]]:
    async def ask(tool: str, timeout_s: float = 20.0, **arguments: Any) -> str:
        result = await server.call(episode, tool, arguments, timeout_s=timeout_s)
        text = text_of(result.content)
        return f"error: {text}" if result.is_error else text

    return ask


async def test_a_pattern_of_a_server_is_never_looked_for_in_its_answers() -> None:
    server = McpServer("s", RAW, session="episode")
    server.open("e")
    assert await asker(server)("pattern") == "done"
    assert await asker(server)("listed") == "0", "nor is it asked for all of its tools in the middle of a run"
    await server.close("e")


MISSHAPEN = [
    '{"jsonrpc": "2.0", "id": NUMBER}',
    '{"jsonrpc": "2.0", "id": NUMBER, "result": [1]}',
    '{"jsonrpc": "2.0", "id": NUMBER, "result": "done"}',
    '{"jsonrpc": "2.0", "id": NUMBER, "result": null}',
    '{"jsonrpc": "2.0", "id": "NUMBER", "error": "no"}',
    '{"result": {}, "id": NUMBER, "jsonrpc": "1.0"}',
    '{"id": NUMBER, "jsonrpc": "2.0", "error": {"message": "no code"}}',
    '{"jsonrpc": "2.0", "id": NUMBER, "result": {"content": "done"}}',
    '{"jsonrpc": "2.0", "id": NUMBER, "result": {"content": [{"type": "picture"}]}}',
    '{"jsonrpc": "2.0", "id": NUMBER, "result": {}}',
    '{"jsonrpc": "2.0", "id": NUMBER, "result": "' + "x" * 100_000 + '"}',
    '{"jsonrpc": "2.0", "result": ["' + "x" * 100_000 + '"], "id": NUMBER}',
]


async def test_an_answer_of_a_wrong_shape_fails_its_call_at_once() -> None:
    """The deadline of each call is longer than any test may take."""
    server = McpServer("s", RAW, session="episode")
    server.open("e")
    ask = asker(server)
    for line in MISSHAPEN:
        with pytest.raises(ToolError, match="Tool call failed: "):
            await ask("misshapen", timeout_s=3600.0, line=line)
    assert await ask("pid"), "the connection goes on"
    await server.close("e")


async def test_a_flood_of_messages_is_told_once_and_keeps_nobody_from_going_on(caplog: pytest.LogCaptureFixture) -> None:
    server = McpServer("s", RAW, session="episode")
    server.open("e")
    ask = asker(server)
    assert await ask("pid")
    begun, turns = asyncio.create_task(ask("flood", timeout_s=60.0)), 0
    while not begun.done():
        turns += 1
        await asyncio.sleep(0)
    assert await begun == "done" and turns > 200_000, "the event loop goes on between any two lines"
    assert caplog.text.count("changed its list of tools") == 1
    with pytest.raises(ToolError, match=r"no no no.*… \(3000000 characters\)$"):
        await ask("refuse")
    await server.close("e")


async def test_a_server_that_is_killed_in_the_middle_of_a_call_is_started_again() -> None:
    before = held()
    server = McpServer("s", RAW, session="episode")
    server.open("e")
    ask = asker(server)
    first = int(await ask("pid"))
    calls = [asyncio.create_task(ask("hang")) for _ in range(3)]
    assert await underway(server, 3)
    os.kill(first, signal.SIGKILL)
    told = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(t) for t in told} == {ConnectionError} and "MCP server 's': " in str(told[0])
    second = int(await ask("pid"))
    assert second != first and is_alive(second)

    assert await ask("noise") == "done"
    with pytest.raises(TooLargeError, match=r"of 7000\d{4} bytes is too large"):
        await ask("large", size=70_000_000)
    orphan = int(await ask("child"))
    os.kill(second, signal.SIGKILL)
    assert await until(lambda: server._sessions["e"]._words.has_ended)
    with pytest.raises(
        ConnectionError, match=r"ended since the last call, and what it remembered is lost; its standard err"
    ):
        await ask("count")
    assert await ask("count") == "1"
    await server.close("e")
    assert not is_alive(second) and await until(lambda: not is_alive(orphan)), "not even its children are left"
    assert await until(lambda: held() == before)


async def test_an_episode_has_a_server_of_its_own_that_ends_with_its_last_tool() -> None:
    before = held()
    own = McpServer("own", COMMAND, session="episode")
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
    assert own.num_connected == 0 and not any(map(is_alive, pids))
    assert await until(lambda: held() == before)


async def test_calls_that_are_late_or_cancelled_are_cancelled_at_the_server() -> None:
    shared = McpServer("shared", COMMAND, limits=McpLimits(keep_s=0.1))
    shared.open("a")
    ask = asker(shared, "a")
    pid = int(await ask("pid"))
    with pytest.raises(ToolTimeoutError, match=r"no answer within 0\.5 s"):
        await ask("hang", timeout_s=0.5)
    late = int(await ask("hung"))
    task = asyncio.create_task(ask("hang"))
    while await ask("hung") != str(late + 1):
        pass
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while await ask("cancelled") != str(late + 1):
        pass

    naps = [asyncio.create_task(ask("nap")) for _ in range(64)]
    assert await ask("count") == "1" and not any(nap.done() for nap in naps), "a quick call does not wait for slow ones"
    await ask("wake")
    assert await asyncio.gather(*naps) == ["awake"] * 64

    assert "the disk is full" in await ask("broken")
    assert "Unknown tool" in await ask("nowhere")
    assert (await ask("lie")).startswith("error: ")
    assert len(await ask("large", size=7_000_000)) == 7_000_000
    with pytest.raises(TooLargeError, match=r"of 7000\d{4} bytes is too large; ask for less"):
        await ask("large", size=70_000_000)
    assert int(await ask("pid")) == pid, "none of this broke the connection"
    await shared.close("a")
    shared.open("b")
    assert int(await asker(shared, "b")("pid")) == pid, "it is kept a while for the next episode"
    await shared.close("b")
    assert await until(lambda: not is_alive(pid))


async def test_a_server_that_freezes_is_given_up_and_one_that_is_dead_for_good_fails_at_once(tmp_path: Path) -> None:
    marker = tmp_path / "dead"
    server = McpServer("s", {**RAW, "env": {"DEAD_IF": str(marker)}}, limits=McpLimits(keep_s=0))
    server.open("e")
    ask = asker(server)
    pid = int(await ask("pid"))
    marker.touch()
    for tool in ("freeze", "pid", "pid"):
        with pytest.raises(ToolTimeoutError):
            await ask(tool, timeout_s=0.1)
    assert not is_alive(pid), "three calls without an answer are enough"
    with pytest.raises(ConnectionError, match=r"its standard error ends: licence expired \| ask the vendor"):
        await ask("pid")
    tries = server._sessions[""]._num_failures
    server._sessions[""]._retry_at += 3600
    for _ in range(20):
        with pytest.raises(ConnectionError, match=rf"failed {tries} times in a row, last: .*licence expired.* tried again"):
            await ask("pid")
    marker.unlink()
    server._sessions[""]._retry_at = 0.0
    assert (await ask("pid")).isdigit(), "and it is tried again"
    await server.close("e")


@pytest.mark.parametrize(("transport", "path"), each(2, [("streamable-http", "mcp"), ("sse", "sse")]))
async def test_a_server_behind_a_url_may_change_its_tools_and_be_killed_and_started_again(
    transport: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def start() -> asyncio.subprocess.Process:
        command = [sys.executable, str(SERVER), transport, str(port)]
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
        for _ in range(6000):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            await asyncio.sleep(0.02)
        return process

    before = held()
    process = await start()
    server = McpServer("web", {"url": f"http://127.0.0.1:{port}/{path}", "transport": transport}, session="episode")
    server.open("e")
    ask = asker(server)
    try:
        size = 900_000 if transport == "sse" else 7_000_000  # the SDK takes 1 MiB at once by SSE
        assert len(await ask("large", size=size)) == size
        assert "the disk is full" in await ask("broken")
        assert await ask("learn") == "learnt" and await ask("fresh") == "new"
        assert "Unknown tool: lie" in await ask("lie")
        assert await until(lambda: "changed its list of tools; the run keeps" in caplog.text)
        with pytest.raises(ToolTimeoutError):
            await ask("hang", timeout_s=0.1)
        call = asyncio.create_task(ask("hang"))
        assert await underway(server, 1)
        process.kill()
        await process.wait()
        with pytest.raises(ConnectionError, match="MCP server 'web'"):
            await call
        process = await start()
        for _ in range(3):
            try:
                assert await ask("count") == "1"
                break
            except ConnectionError:
                continue
        else:
            raise AssertionError("it was not connected to again")
    finally:
        await server.close("e")
        process.kill()
        await process.wait()
    assert await until(lambda: held() == before)


async def test_a_server_that_never_gets_ready_holds_nobody_up() -> None:
    before = held()
    deaf = {"command": sys.executable, "args": ["-S", "-c", "import time; time.sleep(3600)"]}
    server = McpServer("deaf", deaf, session="episode", limits=McpLimits(connect_timeout_s=0.2))
    server.open("e")
    with pytest.raises(ConnectionError, match=r"it did not answer the handshake within 0\.2 s"):
        await asker(server)("pid")
    await server.close("e")
    patient = McpServer("deaf", deaf, session="episode")
    for name in map(str, range(5)):
        patient.open(name)
    calls = [asyncio.create_task(asker(patient, str(n))("pid")) for n in range(5)]
    await asyncio.sleep(0.2)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, *(patient.close(str(n)) for n in range(5)), return_exceptions=True)
    assert {c.cancelled() for c in calls} == {True}
    assert await until(lambda: held() == before)


def test_a_server_that_ends_at_once_is_refused_with_its_last_words() -> None:
    dying = {"command": sys.executable, "args": ["-c", "import sys; sys.exit('no key: set API_KEY')"]}
    with pytest.raises(ConfigError, match=r"server 'dying': .*its standard error ends: no key: set API_KEY; check its"):
        list_tools("dying", dying)
    silent = {"command": sys.executable, "args": ["-c", "import time; time.sleep(3600)"]}
    with pytest.raises(ConfigError, match="server 'silent': TimeoutError"):
        list_tools("silent", silent, timeout_s=0.5)


def test_what_the_model_sees_is_what_the_server_declared() -> None:
    from mcp.server import MCPServer

    sys.path.insert(0, str(SERVER.parent))
    try:
        import mcp_hostile_server
    finally:
        sys.path.pop(0)
    assert isinstance(mcp_hostile_server.server, MCPServer)
    declared = {t.name: t.input_schema for t in asyncio.run(mcp_hostile_server.server.list_tools())}
    shown = {s["function"]["name"]: s["function"]["parameters"] for s in list_tools("s", COMMAND)}
    assert shown == declared
    draw = shown["draw"]
    assert draw["$defs"]["Point"]["properties"]["next"]["anyOf"][0] == {"$ref": "#/$defs/Point"}
    assert draw["$defs"]["Unit"]["enum"] == ["m", "ft"] and draw["properties"]["width"]["maximum"] == 9
    assert draw["properties"]["style"]["default"] == "solid" and draw["required"] == ["points"]


async def test_a_server_behind_a_url_that_does_not_answer_the_farewell_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyturn.tools.mcp_connection.CLOSE_S", 0.2)
    said_farewell, over = asyncio.Event(), asyncio.Event()

    async def serve(reading: asyncio.StreamReader, writing: asyncio.StreamWriter) -> None:
        try:
            while head := await reading.readuntil(b"\r\n\r\n"):
                if head.startswith(b"DELETE"):
                    said_farewell.set()
                    await over.wait()
                sizes = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reading.readexactly(int(sizes[0].split(b":")[1])) if sizes else b"{}"
                asked = json.loads(body)
                params, number = asked.get("params") or {}, asked.get("id")
                result: dict[str, Any] = {"content": [{"type": "text", "text": "done"}], "tools": []}
                if asked.get("method") == "initialize":
                    version = params["protocolVersion"]
                    result = {"protocolVersion": version, "capabilities": {}, "serverInfo": {"name": "s", "version": "1"}}
                reply = b"" if number is None else json.dumps({"jsonrpc": "2.0", "id": number, "result": result}).encode()
                status = b"405 No" if head.startswith(b"GET") else b"202 OK" if number is None else b"200 OK"
                writing.write(b"HTTP/1.1 " + status + b"\r\nMcp-Session-Id: s\r\nContent-Type: application/json\r\n")
                writing.write(f"Content-Length: {len(reply)}\r\n\r\n".encode() + reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writing.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/mcp"
    server = McpServer("rude", {"url": url}, session="episode")
    server.open("e")
    assert await asker(server)("any") == "done"
    await server.close("e")
    assert said_farewell.is_set() and server.num_connected == 0
    over.set()
    listening.close()
    await asyncio.sleep(0.05)
