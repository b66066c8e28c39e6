"""Runs five thousand episodes with faults and measures hangs, leaks, unnamed errors, and lost throughput.

    20 % of the tool calls hang (some ignore cancellation, some block a thread), crash, return garbage or 100 MB
     5 % of the MCP sessions (a server process each, over standard input and output) drop in the middle of a call
         an inference server (a process) is killed every minute
     5 % of the calls are errors of the model

Everything runs twice with the same plan. The second run has no faults but does the same work: a call that hung takes its
deadline (plus the grace period if it ignored cancellation), garbage and 100 MB are created and discarded, and a server that
dropped answers at that moment. The time that killed inference servers had spent on lost requests is added to the second
run's time, divided by the number of concurrent episodes. The loss beyond the lost work is:

    lost_share = 1 - (seconds without faults + lost engine seconds / concurrency) / seconds with faults

    python benchmarks/chaos.py                  5,000 episodes, twice
    python benchmarks/chaos.py --kill-every 15  an inference server is killed four times as often
    python benchmarks/chaos.py --short          200 episodes, without the comparison, as the tests run it
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import os
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _chaos_parts import SERVER, Blocks, Chaotic, ServerProcess, World

from polyturn.core import errors
from polyturn.core.messages import Message
from polyturn.core.task import Task
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.engines.pool import EnginePool
from polyturn.infra.loop import LoopMonitor
from polyturn.rewards.router import RewardRouter
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.limits import Limits
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing.episodes import tiny_codec
from polyturn.tokens.parsers import HermesParser
from polyturn.tools.failures import ToolFailure
from polyturn.tools.options import ToolOptions
from polyturn.tools.registry import initialize_tools_from_config
from polyturn.tools.toolbox import Toolbox

LONG = World(episodes=5000, concurrency=128)
SHORT = World(
    episodes=200,
    concurrency=64,
    engine_s=(0.02, 0.1),
    tool_s=(0.005, 0.03),
    deadline_s=0.3,
    replicas=2,
    kill_every_s=0.7,
)
EPISODE_S = 60.0
"""Seconds after which an episode counts as hung."""
SETTLE_S = 15.0
"""Seconds that idle processes and connections may take to end."""
MAX_LOST_SHARE = 0.05


@dataclass(kw_only=True)
class Outcome:
    """The results of a run."""

    wall_s: float = 0.0
    ended: int = 0
    calls: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    """Kind of failure -> number of tool calls."""
    failures: Counter[str] = field(default_factory=Counter)
    """Type of error -> number of trajectories."""
    stops: Counter[str] = field(default_factory=Counter)
    untyped: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    kills: int = 0
    lost_engine_s: float = 0.0
    live_instances: int = 0
    num_blocked: int = 0

    def add(self, group: TrajectoryGroup) -> None:
        """Count a group of one trajectory."""
        (trajectory,) = group.trajectories
        self.ended += 1
        self.stops[trajectory.stop_reason.value] += 1
        self.longest_s = max(self.longest_s, trajectory.metrics["duration_s"])
        self.num_blocked += int(trajectory.metrics.get("loop_blocked", 0))
        for result in (r for turn in trajectory.turns for r in turn.tool_results):
            self.calls += 1
            if result.error is None:
                continue
            self.kinds[result.error] += 1
            if result.error not in set(ToolFailure) or not str(result.content).startswith(f"Error ({result.error}): "):
                self.untyped.append(f"{trajectory.id}: {result.error}: {str(result.content)[:80]}")
        if trajectory.error is not None:
            kind = trajectory.error.partition(":")[0]
            self.failures[kind] += 1
            if kind not in vars(errors):
                self.untyped.append(f"{trajectory.id}: {trajectory.error[:120]}")


def holdings() -> dict[str, int]:
    """Return the numbers of resources that this process has."""
    links = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
    return {
        "processes": num_descendants(),
        "threads": threading.active_count(),
        "files": sum(not link.startswith("socket:") for link in links),
        "sockets": sum(link.startswith("socket:") for link in links),
    }


def num_descendants() -> int:
    """Return the number of processes started from this one, including zombies."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    family, last = {os.getpid()}, 0
    while len(family) != last:
        last = len(family)
        family |= {pid for pid, parent in parents.items() if parent in family}
    return len(family) - 1


def rss_mib() -> float:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


@contextlib.asynccontextmanager
async def killer(world: World, servers: list[ServerProcess], outcome: Outcome) -> AsyncIterator[None]:
    """Kill one server after another."""

    async def kill() -> None:
        while True:
            await asyncio.sleep(world.kill_every_s)
            servers[outcome.kills % len(servers)].kill()
            outcome.kills += 1

    task = asyncio.create_task(kill())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def run(world: World, folder: Path) -> Outcome:
    """Run all episodes and close everything."""
    outcome = Outcome()
    ours = [Chaotic(world), Blocks(world)]
    tools: list[Any] = [*ours]
    if world.mcp_share:
        (folder / "servers.json").write_text(
            json.dumps({"mcpServers": {"chaos": {"command": sys.executable, "args": ["-SE", str(SERVER)]}}})
        )
        item = {
            "class_name": "polyturn.tools.mcp.MCPBaseTool",
            "config": {"type": "mcp", "session": "episode", "rate_limit": 100_000, "keep": 0},
            "mcp": {"mcp_servers_config_path": "servers.json"},
        }
        tools += await asyncio.to_thread(initialize_tools_from_config, {"tools": [item]}, base=folder)
    box = Toolbox(tools, ToolOptions(timeout_s=world.deadline_s, max_result_tokens=512), codec=tiny_codec())
    if world.mcp_share:
        box.bounded["work"].timeout_s = 30.0  # the session is started within the call
    servers = [ServerProcess(world, name=f"server {i}") for i in range(world.replicas)]
    for server in servers:
        await server.start()
    pool = EnginePool(servers, patience_s=60.0)
    context = RolloutContext(
        engine=pool,
        codec=tiny_codec(),
        parser=HermesParser(),
        tools=box,
        interactions={},
        rewarder=RewardRouter({}),
        scheduler=MultiTurnScheduler(),
        limits=Limits(max_turns=8, timeout_s=EPISODE_S),
        monitor=LoopMonitor(limit_s=1.0),
        sanity_every=50,
    )
    task = Task(id="t", prompt=(Message(role="user", content="What is 2+2?"),), data_source="openai/gsm8k", ground_truth="4")
    plain = replace(task, tools=("waits", "blocks"))
    rollouts = RolloutPool(context, max_concurrent=world.concurrency, max_failed_share=0.2, on_group=outcome.add)
    specs = [GroupSpec(id=f"g{i}", task=task if has_mcp(world, i) else plain, seed=i) for i in range(world.episodes)]
    began = time.monotonic()
    async with asyncio.timeout((1 + world.episodes / world.concurrency) * EPISODE_S), contextlib.AsyncExitStack() as stack:
        if world.is_hostile:
            await stack.enter_async_context(killer(world, servers, outcome))
        await rollouts.run(specs)
        outcome.wall_s = time.monotonic() - began
    await pool.close()
    for server in servers:
        await server.close()
    box.close()
    outcome.lost_engine_s = sum(server.lost_s for server in servers)
    outcome.live_instances = len(box.live_ids) + sum(len(tool.live) for tool in ours)
    return outcome


def has_mcp(world: World, number: int) -> bool:
    """Return whether the plan gives an episode an MCP session."""
    import random

    return random.Random(f"chaos {number}").random() < world.mcp_share


async def settled(before: dict[str, int]) -> dict[str, int]:
    """Return the increase of each resource, after idle ones had time to end."""
    until = time.monotonic() + SETTLE_S
    while True:
        gc.collect()
        extra = {name: max(0, count - before[name]) for name, count in holdings().items()}
        extra["tasks"] = len(asyncio.all_tasks()) - 1
        if not any(extra.values()) or time.monotonic() > until:
            return extra
        await asyncio.sleep(0.1)


async def measure(world: World, *, compares: bool) -> dict[str, Any]:
    """Run the episodes with and without faults, and return the results."""
    if world.mcp_share and find_spec("mcp") is None:
        world = replace(world, mcp_share=0.0)
    with TemporaryDirectory() as name:
        folder = Path(name)
        await run(replace(world, episodes=8, is_hostile=False), folder)  # resources that are created once and kept
        await settled(holdings())
        before, rss = holdings(), rss_mib()
        chaos = await run(world, folder)
        leaked = await settled(before)
        result: dict[str, Any] = {
            "episodes": world.episodes,
            "ended": chaos.ended,
            "hung": world.episodes - chaos.ended + (chaos.longest_s > EPISODE_S),
            "longest_s": round(chaos.longest_s, 2),
            "tool_calls": chaos.calls,
            "failed_calls": dict(sorted(chaos.kinds.items())),
            "failed_trajectories": dict(sorted(chaos.failures.items())),
            "stops": dict(sorted(chaos.stops.items())),
            "untyped": chaos.untyped[:5],
            "leaked": {"instances": chaos.live_instances, **leaked},
            "engine_kills": chaos.kills,
            "mcp": bool(world.mcp_share),
            "loop_blocked": chaos.num_blocked,
            "rss_growth_mib": round(rss_mib() - rss, 1),
            "chaos_s": round(chaos.wall_s, 2),
        }
        if compares:
            clean = await run(replace(world, is_hostile=False), folder)
            lost_s = chaos.lost_engine_s / world.concurrency
            result |= {
                "clean_s": round(clean.wall_s, 2),
                "lost_engine_s": round(chaos.lost_engine_s, 2),
                "lost_share": round(1 - (clean.wall_s + lost_s) / chaos.wall_s, 4),
            }
    return result


def problems(result: dict[str, Any]) -> list[str]:
    """Return a sentence for each missed target."""
    sentences = [f"{count} {name} leaked" for name, count in result["leaked"].items() if count]
    sentences += ["not every episode ended"] * bool(result["hung"])
    sentences += [f"not typed: {one}" for one in result["untyped"]]
    if result.get("lost_share", 0.0) > MAX_LOST_SHARE:
        sentences.append(f"{result['lost_share']:.1%} of the throughput was lost beyond the work really lost")
    return sentences


def main() -> None:
    """Run the benchmark and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="200 episodes, without the comparison")
    parser.add_argument("--episodes", type=int, help="another number of episodes")
    parser.add_argument("--kill-every", type=float, help="seconds between two kills of an inference server")
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    world = SHORT if options.short else LONG
    if options.episodes:
        world = replace(world, episodes=options.episodes)
    if options.kill_every:
        world = replace(world, kill_every_s=options.kill_every)
    result = asyncio.run(measure(world, compares=not options.short))
    print(json.dumps(result))
    if sentences := problems(result):
        sys.exit("; ".join(sentences))


if __name__ == "__main__":
    main()
