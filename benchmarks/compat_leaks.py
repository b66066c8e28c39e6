"""Counts the instances left after 10,000 episodes with errors, time-outs and cancellations; the target is 0.

It uses the shipped tools and interactions, a faulty tool and a faulty interaction, a real search server, and cancellations
from outside. It also reports episodes per second and the memory that stays in use.

    report = await count_leaks(300, seed=0)
    report.num_left   ->   0

Every episode calls the shipped tools and the faulty one, and uses a shipped or the faulty interaction. Some calls raise,
some hang past their deadline, some episodes are cancelled at any moment. Counted afterwards are the instances in the
plug-ins' dictionaries, the ids that the framework still has, and the open connections.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
import resource
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from polyturn.core.generation import GenerateRequest
from polyturn.core.messages import Message
from polyturn.core.task import InteractionRef, Task, ToolKwargs
from polyturn.interactions.base import BaseInteraction
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.interactions.weather import WeatherInteraction
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context
from polyturn.tools.base import BaseTool
from polyturn.tools.gsm8k import Gsm8kTool
from polyturn.tools.search import SearchTool
from support.services import serve

DEADLINE_S = 0.05
TROUBLES = ("none", "none", "none", "none", "raise", "hang", "plain")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakReport:
    """The number of leftovers after the episodes, and their stop reasons."""

    num_episodes: int
    num_left: int
    """Sum of instances, live ids and users of connections."""
    left: dict[str, int]
    ends: dict[str, int]
    """Stop reason -> number of episodes; "cancelled" is a cancellation from outside."""


class _Troubled:
    """A plug-in that tracks its instances, and raises or hangs as the row says."""

    def __init__(self) -> None:
        self.live: set[str] = set()

    async def trouble(self, kind: Any) -> None:
        if kind == "raise":
            raise ValueError("trouble")
        if kind == "hang":
            await asyncio.sleep(10 * DEADLINE_S)


class TroubledPartner(BaseInteraction, _Troubled):
    """An interaction that raises or hangs when it starts, answers or ends, as the row says."""

    def __init__(self, config: dict[str, Any]) -> None:
        BaseInteraction.__init__(self, config)
        _Troubled.__init__(self)

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Start an episode; faults happen after the instance was created."""
        chosen = await super().start_interaction(instance_id)
        self.live.add(chosen)
        await self.trouble(kwargs.get("start"))
        return chosen

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answer."""
        await self.trouble(kwargs.get("answer"))
        return len(messages) > 4, "And?", 0.5, {}

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """End the episode; every fifth time with a fault."""
        self.live.remove(str(instance_id))
        await self.trouble("raise" if hash(instance_id) % 5 == 0 else "none")


class TroubledTool(BaseTool, _Troubled):
    """A tool that raises or hangs when it is created, called or released, as the row says."""

    def __init__(self) -> None:
        function = {"name": "troubled", "parameters": {"type": "object", "properties": {"do": {"type": "string"}}}}
        BaseTool.__init__(self, {}, {"type": "function", "function": function})
        _Troubled.__init__(self)

    async def create(self, instance_id: str | None = None, *, do: str = "none", **kwargs: Any) -> str:
        """Begin one episode."""
        self.live.add(str(instance_id))
        await self.trouble(do)
        return str(instance_id)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        """Answer."""
        await self.trouble(parameters.get("do"))
        return "done"

    async def release(self, instance_id: str, *, do: str = "none", **kwargs: Any) -> None:
        """End the episode."""
        self.live.remove(instance_id)
        await self.trouble(do)


async def count_leaks(num_episodes: int, *, seed: int = 0, max_concurrent: int = 64) -> LeakReport:
    """Run the episodes and count the leftovers."""
    choose = random.Random(seed)
    ends: Counter[str] = Counter()
    gsm8k, weather, troubled = Gsm8kInteraction({}), WeatherInteraction({}), TroubledPartner({})
    interactions = {"gsm8k": gsm8k, "weather": weather, "troubled": troubled}
    checker, tool = Gsm8kTool({}), TroubledTool()
    slots = asyncio.Semaphore(max_concurrent)

    async with serve(_search) as server:
        search = SearchTool({"retrieval_service_url": server.url, "retry_delay": 0.001, "max_retries": 2})
        context = scripted_context(
            _speaker(choose),
            tools=[checker, search, tool],
            interactions=interactions,
            tool_timeout_s=DEADLINE_S,
            interaction_timeout_s=DEADLINE_S,
            latency_s=0.0005,
        )

        async def one(number: int) -> None:
            async with slots:
                episode = asyncio.create_task(run_episode(context, _task(choose, number), id=f"e{number}"))
                if choose.random() < 0.1:
                    await asyncio.sleep(choose.random() * DEADLINE_S)
                    episode.cancel()
                try:
                    ends[(await episode).stop_reason.value] += 1
                except asyncio.CancelledError:
                    ends["cancelled"] += 1

        async with asyncio.TaskGroup() as group:
            for number in range(num_episodes):
                group.create_task(one(number))
        await asyncio.gather(*context.tools.late)
        left = {
            "gsm8k": len(gsm8k._instance_dict),
            "weather": len(weather._instance_dict),
            "troubled partner": len(troubled.live),
            "gsm8k tool": len(checker._instance_dict),
            "search tool": len(search._instance_dict),
            "troubled tool": len(tool.live),
            "connections": search.num_connected,
            "live tool ids": len(context.tools.live_ids),
            "live interaction ids": context.num_live_interactions,
        }
    return LeakReport(
        num_episodes=num_episodes,
        num_left=sum(left.values()),
        left={k: v for k, v in left.items() if v},
        ends=dict(sorted(ends.items())),
    )


def _task(choose: random.Random, number: int) -> Task:
    name = choose.choice(["gsm8k", "weather", "troubled", "troubled"])
    trouble = {key: choose.choice(TROUBLES) for key in ("start", "answer")}
    return Task(
        id=str(number),
        prompt=(Message(role="user", content="2+2?"),),
        interaction=InteractionRef(name=name, kwargs={"name": name, "ground_truth": "4", **trouble}),
        tools_kwargs={
            "calc_gsm8k_reward": ToolKwargs(create_kwargs={"ground_truth": "4"}),
            "troubled": ToolKwargs(
                create_kwargs={"do": choose.choice(["none"] * 12 + ["raise", "hang"])},
                release_kwargs={"do": choose.choice(TROUBLES)},
            ),
        },
    )


def _speaker(choose: random.Random) -> Any:
    def say(request: GenerateRequest) -> str | Exception:
        kind = choose.choice(["answer", "answer", "answer", "check", "search", "trouble", "unknown"])
        if choose.random() < 0.02:
            return RuntimeError("the engine is lost")
        calls = {
            "check": ("calc_gsm8k_reward", {"answer": "4"}),
            "search": ("search", {"query_list": ["four"]}),
            "trouble": ("troubled", {"do": choose.choice(TROUBLES)}),
            "unknown": ("nothing_like_this", {}),
        }
        if kind not in calls:
            return choose.choice(["#### 4", "#### 5"])
        name, arguments = calls[kind]
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    return say


def _search(request: dict[str, Any], number: int) -> Any:
    if number % 7 == 0:
        return 503, "busy"
    return {"result": [[{"document": {"contents": "title\ntext"}, "score": 1.0}] for _ in request["queries"]]}


NUM_EPISODES = 10_000


def main() -> None:
    """Run the episodes and print one JSON line."""
    logging.disable(logging.WARNING)
    asyncio.run(count_leaks(200, seed=1))
    gc.collect()
    before, tasks = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    report = asyncio.run(count_leaks(NUM_EPISODES, seed=0, max_concurrent=128))
    seconds = time.perf_counter() - tasks
    print(f"{report.num_episodes} episodes ended: {report.ends}; left: {report.left or 'nothing'}")
    print(
        json.dumps(
            {
                "episodes": report.num_episodes,
                "instances_left": report.num_left,
                "ends": report.ends,
                "episodes_per_s": round(report.num_episodes / seconds, 1),
                "peak_memory_growth_mib": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
