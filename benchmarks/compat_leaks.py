"""Instances left after 10,000 episodes with errors, time-outs and cancellations mixed in: should be 0.

The shipped tools and interactions, a tool and a partner that raise and hang, a real search server, cancellations from
outside. Also how many episodes of that kind a second takes, and what stays in memory.

    report = await count_leaks(300, seed=0)
    report.num_left   ->   0

Every episode calls the shipped tools and a troubled one, and talks to a shipped or a troubled partner; some raise, some hang
past their deadline, some are cancelled at any moment. What is counted afterwards: instances in the plug-ins' own books,
ids that are live for the framework, and connections that are still open.
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
    """What is left after the episodes, and how they ended."""

    num_episodes: int
    num_left: int
    """Instances, live ids and users of connections together."""
    left: dict[str, int]
    ends: dict[str, int]
    """How many episodes ended by which stop reason; "cancelled" from outside."""


class _Troubled:
    """Keeps books of its instances, and raises or hangs where it is told to."""

    def __init__(self) -> None:
        self.live: set[str] = set()

    async def trouble(self, kind: Any) -> None:
        if kind == "raise":
            raise ValueError("trouble")
        if kind == "hang":
            await asyncio.sleep(10 * DEADLINE_S)


class TroubledPartner(BaseInteraction, _Troubled):
    """Raises or hangs when it starts, answers or ends, as the row says."""

    def __init__(self, config: dict[str, Any]) -> None:
        BaseInteraction.__init__(self, config)
        _Troubled.__init__(self)

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin one episode; what goes wrong goes wrong after something was taken."""
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
        """End the episode, badly for every fifth."""
        self.live.remove(str(instance_id))
        await self.trouble("raise" if hash(instance_id) % 5 == 0 else "none")


class TroubledTool(BaseTool, _Troubled):
    """Raises or hangs when it is created, called or released, as the row says."""

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
    """Run the episodes and count what they leave behind."""
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


def _search(asked: dict[str, Any], number: int) -> Any:
    if number % 7 == 0:
        return 503, "busy"
    return {"result": [[{"document": {"contents": "title\ntext"}, "score": 1.0}] for _ in asked["queries"]]}


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
