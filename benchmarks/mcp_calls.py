"""Measures calls of 64 episodes to one MCP server: rate, waiting times, and leftovers after the server dies often.

    python benchmarks/mcp_calls.py [--calls 40] [--storm-s 10]

This file is also the server, built with the SDK: it has a quick tool and a tool that takes a second. Prints one JSON line
with calls per second over each transport, compared to the SDK's bare client; the milliseconds of a quick call while 63 slow
ones run; the milliseconds until the first answer of an episode with its own server; and, for a storm in which the server is
killed repeatedly, the results of the calls and the leftover processes, tasks and file descriptors.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from statistics import quantiles
from typing import Any

from polyturn.core.messages import ToolCall
from polyturn.core.task import Task
from polyturn.serving.listen import bind
from polyturn.tools.episode_tools import EpisodeTools
from polyturn.tools.mcp import MCPBaseTool
from polyturn.tools.mcp_connection import McpServer
from polyturn.tools.toolbox import Toolbox

NUM_EPISODES = 64
ARGUMENTS = [str(Path(__file__).resolve()), "--serve"]
HERE: dict[str, Any] = {"command": sys.executable, "args": ARGUMENTS}
TYPED = {None, "connection", "timeout", "circuit_open"}


def serve(port: int) -> None:
    """Serve the tools."""
    from mcp.server import MCPServer

    server = MCPServer("bench", log_level="ERROR")

    @server.tool()
    async def add(a: int, b: int) -> str:
        """Add."""
        return str(a + b)

    @server.tool()
    async def slow(a: int, b: int) -> str:
        """Take a second."""
        await asyncio.sleep(1.0)
        return str(a + b)

    @server.tool()
    async def pid(a: int, b: int) -> str:
        """Say which process this is."""
        return str(os.getpid())

    if port:
        server.run(transport="streamable-http", port=port)
    else:
        server.run()


def box_of(server: McpServer) -> Toolbox:
    """Return the server's tools."""
    tools = []
    for name in ("add", "slow", "pid"):
        numbers = {key: {"type": "integer"} for key in "ab"}
        function = {"name": name, "parameters": {"type": "object", "properties": numbers}}
        tool = MCPBaseTool({"rate_limit": 1e6, "timeout": 20}, {"type": "function", "function": function})
        tool.connect(server)
        tools.append(tool)
    return Toolbox(tools)


async def ask(session: EpisodeTools, name: str, a: int = 1, b: int = 2) -> tuple[str, str | None]:
    """Return a call's text, and the kind of its failure."""
    (result,) = await session.call([ToolCall(id="c", name=name, arguments={"a": a, "b": b})])
    return str(result.content), result.error


@contextlib.asynccontextmanager
async def episodes(box: Toolbox, count: int) -> Any:
    """Start episodes, and end them after the block."""
    async with contextlib.AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(EpisodeTools(box, f"e{n}")) for n in range(count)]
        for session in sessions:
            await session.start(Task(id="t", prompt=()))
        yield sessions


async def calls_per_s(settings: dict[str, Any], *, num_calls: int) -> tuple[float, list[float]]:
    """Return the calls per second of all episodes together, and the seconds of each call."""
    times: list[float] = []
    async with episodes(box_of(McpServer("bench", settings)), NUM_EPISODES) as sessions:
        await ask(sessions[0], "add")

        async def play(session: EpisodeTools, number: int) -> None:
            for turn in range(num_calls):
                began = time.perf_counter()
                answer = await ask(session, "add", number, turn)
                assert answer == (str(number + turn), None), answer
                times.append(time.perf_counter() - began)

        began = time.perf_counter()
        await asyncio.gather(*(play(s, n) for n, s in enumerate(sessions)))
        return NUM_EPISODES * num_calls / (time.perf_counter() - began), times


async def bare_per_s(*, num_calls: int) -> float:
    """Return the calls per second of the SDK's bare client."""
    from mcp import Client, StdioServerParameters

    async with Client(StdioServerParameters(**HERE)) as client:
        await client.call_tool("add", {"a": 1, "b": 2})

        async def play(number: int) -> None:
            for turn in range(num_calls):
                await client.call_tool("add", {"a": number, "b": turn})

        began = time.perf_counter()
        await asyncio.gather(*map(play, range(NUM_EPISODES)))
        return NUM_EPISODES * num_calls / (time.perf_counter() - began)


async def behind_slow_ones() -> list[float]:
    """Return the seconds of quick calls while all other episodes wait for slow ones."""
    async with episodes(box_of(McpServer("bench", HERE)), NUM_EPISODES) as (quick, *others):
        await ask(quick, "add")
        waiting = [asyncio.create_task(ask(session, "slow")) for session in others]
        times: list[float] = []
        while len(times) < 50 and not any(task.done() for task in waiting):
            began = time.perf_counter()
            assert (await ask(quick, "add"))[0] == "3"
            times.append(time.perf_counter() - began)
        await asyncio.gather(*waiting)
        return times


async def first_calls(count: int = 8) -> list[float]:
    """Return the seconds until the first answer of episodes that each start a server, one after another."""
    times = []
    box = box_of(McpServer("bench", HERE, session="episode"))
    for number in range(count):
        async with EpisodeTools(box, f"own{number}") as session:
            await session.start(Task(id="t", prompt=()))
            began = time.perf_counter()
            assert (await ask(session, "add"))[1] is None
            times.append(time.perf_counter() - began)
    return times


def living(pids: set[int]) -> int:
    """Return the number of these processes that exist."""
    return sum(Path(f"/proc/{pid}").exists() for pid in pids)


async def storm(seconds: float) -> dict[str, Any]:
    """Kill the server repeatedly while all episodes call it; return the results of the calls, and the leftovers."""
    server = McpServer("bench", HERE)
    ends: collections.Counter[str | None] = collections.Counter()
    pids: set[int] = set()
    choose = random.Random(0)
    before = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
    num_kills, longest = 0, 0.0
    async with episodes(box_of(server), NUM_EPISODES) as sessions:
        pids.add(int((await ask(sessions[0], "pid"))[0]))
        over = time.monotonic() + seconds

        async def play(session: EpisodeTools) -> None:
            nonlocal longest
            while time.monotonic() < over:
                began = time.monotonic()
                text, error = await ask(session, choose.choice(("add", "add", "pid")))
                longest = max(longest, time.monotonic() - began)
                ends[error] += 1
                if error is None and len(text) > 2:
                    pids.add(int(text))
                await asyncio.sleep(choose.random() * 0.1)

        players = [asyncio.create_task(play(session)) for session in sessions]
        while time.monotonic() < over:
            await asyncio.sleep(choose.uniform(0.5, 2.0))
            for pid in [p for p in pids if living({p})]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    num_kills += 1
        await asyncio.gather(*players)
    await asyncio.sleep(0.2)
    await server.close_now()
    after = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
    return {
        "storm_s": seconds,
        "storm_kills": num_kills,
        "storm_calls": sum(ends.values()),
        "storm_answered": ends[None],
        "storm_untyped": sum(n for end, n in ends.items() if end not in TYPED),
        "storm_ends": {str(end): n for end, n in sorted(ends.items(), key=str)},
        "storm_longest_call_s": round(longest, 2),
        "left_processes": living(pids),
        "left_tasks": after[0] - before[0],
        "left_fds": after[1] - before[1],
    }


def ms(times: list[float]) -> dict[str, float]:
    """Return median and 99th percentile in milliseconds."""
    cuts = quantiles(times, n=100, method="inclusive")
    return {"p50_ms": round(cuts[49] * 1000, 1), "p99_ms": round(cuts[98] * 1000, 1)}


async def measure(num_calls: int, storm_s: float) -> dict[str, Any]:
    """Return all figures."""
    stdio, times = await calls_per_s(HERE, num_calls=num_calls)
    bare = await bare_per_s(num_calls=num_calls)
    free = bind("127.0.0.1", 0)
    port = free.getsockname()[1]
    free.close()
    process = await asyncio.create_subprocess_exec(sys.executable, *ARGUMENTS, "--port", str(port))
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                (await asyncio.open_connection("127.0.0.1", port))[1].close()
                break
            await asyncio.sleep(0.05)
        http, http_times = await calls_per_s({"url": f"http://127.0.0.1:{port}/mcp"}, num_calls=max(1, num_calls // 4))
    finally:
        process.kill()
        await process.wait()
    return {
        "episodes": NUM_EPISODES,
        "stdio_calls_per_s": round(stdio),
        "stdio_call": ms(times),
        "sdk_client_calls_per_s": round(bare),
        "http_calls_per_s": round(http),
        "http_call": ms(http_times),
        "quick_call_behind_63_slow": ms(await behind_slow_ones()),
        "first_answer_of_an_own_server": ms(await first_calls()),
        **await storm(storm_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=40, help="Calls of each episode.")
    parser.add_argument("--storm-s", type=float, default=10.0, help="Seconds of the storm.")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.port)
        return
    result = asyncio.run(measure(options.calls, options.storm_s))
    print(json.dumps(result))
    if result["storm_untyped"] or result["left_processes"] or result["left_tasks"] > 0 or result["left_fds"] > 0:
        sys.exit("something was left, or a failure had no type")


if __name__ == "__main__":
    main()
