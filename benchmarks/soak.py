"""Checks that memory stays flat over two hundred thousand episodes with failures of every kind.

Episodes of one to four turns run on simulated servers in virtual time, so that waiting costs nothing. Everything else is
real: the loop, tools that are created, called and released, an interaction, deadlines, breakers, limits, rewards. Tools
raise, hang and return too much, interactions raise and hang, episodes are cancelled, servers are killed. After every 10,000
episodes the garbage is collected and the resident memory is read. The slope is that of a straight line through the readings
after the first 50,000 episodes, which fill caches and the allocator's pools.

    python benchmarks/soak.py                      200,000 episodes
    python benchmarks/soak.py --episodes 20000     a quick look
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import gc
import json
import logging
import random
import resource
import sys
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import polyturn
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.core.messages import Message
from polyturn.core.task import InteractionRef, Task
from polyturn.engines.pool import EnginePool
from polyturn.interactions.base import BaseInteraction
from polyturn.rewards.router import RewardRouter
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing.episodes import tiny_codec, turn_ids
from polyturn.tokens.parsers import HermesParser
from polyturn.tools.options import ToolOptions
from polyturn.tools.toolbox import Toolbox
from support.timed_engine import TimedEngine
from support.virtual_time import run_virtual

EPISODES = 200_000
BATCH = 500
CHECK_EVERY = 10_000
WARM_UP = 50_000
MAX_MIB_PER_10K = 1.0

CALLS = [f'<tool_call>\n{{"name": "flaky", "arguments": {{"n": {n}}}}}\n</tool_call>' for n in range(8)]
SAYS = [*CALLS, '<tool_call>\n{"name": "flak', "#### 4", "#### 4", "#### 4", "#### 5", "I do not know."]


@polyturn.tool
async def flaky(n: int) -> str:
    """Fail in one of several ways.

    Args:
        n: The kind of failure.
    """
    if n == 0:
        raise ValueError("no")
    if n == 1:
        await asyncio.sleep(3600)
    if n == 2:
        raise ConnectionResetError("reset")
    return "one word more " * 2000 if n == 3 else "fine"


class User(BaseInteraction):
    """An interaction that raises, hangs, or answers."""

    def __init__(self) -> None:
        super().__init__({"name": "user"})
        self.live: set[str] = set()

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        assert instance_id is not None
        self.live.add(instance_id)
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        chance = zlib.crc32(f"{instance_id} {len(messages)}".encode()) / 2**32
        if chance < 0.01:
            raise RuntimeError("broken")
        if chance < 0.02:
            await asyncio.sleep(3600)
        return chance > 0.5, "Are you sure?", chance, {}

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        assert instance_id is not None
        self.live.remove(instance_id)


def text_ids(request: GenerateRequest) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the text for a request, always the same."""
    return _ids(zlib.crc32(request.request_id.encode()) % len(SAYS))


@functools.cache
def _ids(number: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return turn_ids(SAYS[number])


class Speaking(TimedEngine):
    """A simulated server that returns texts."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the text of `said`, when the server would have."""
        completion = await super().generate(request)
        ids = text_ids(request)[: len(completion.token_ids)]
        logprobs = np.full(len(ids), -0.5, np.float32)
        return dataclasses.replace(completion, token_ids=ids, logprobs=logprobs)


def rss_mib() -> float:
    """Return the resident memory after a garbage collection."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def slope_per_10k(readings: list[tuple[int, float]]) -> float:
    """Return the MiB that 10,000 episodes add, by least squares."""
    if len(readings) < 2:
        return float("nan")
    x, y = np.array(readings).T
    return float(np.polyfit(x / 10_000, y, 1)[0])


async def soak(episodes: int, *, warm_up: int = WARM_UP, every: int = CHECK_EVERY) -> dict[str, Any]:
    """Run the episodes and return the memory figures."""
    servers = [Speaking(plan=lambda request: len(text_ids(request)), name=f"server {i}", timeout_s=5.0) for i in range(2)]
    user = User()
    options = ToolOptions(timeout_s=5.0, max_result_tokens=64, max_concurrency={"flaky": 64})
    box = Toolbox([flaky], options, codec=tiny_codec())
    context = RolloutContext(
        engine=EnginePool(servers, slots=256),
        codec=tiny_codec(),
        parser=HermesParser(),
        tools=box,
        interactions={"user": user},
        rewarder=RewardRouter({}),
        scheduler=MultiTurnScheduler(),
        limits=Limits(max_turns=4, timeout_s=120.0),
        interaction_timeout_s=5.0,
        sanity_every=64,
    )
    plain = Task(id="t", prompt=(Message(role="user", content="2+2?"),), data_source="openai/gsm8k", ground_truth="4")
    talks = dataclasses.replace(plain, id="u", interaction=InteractionRef(name="user", kwargs={"name": "user"}))
    rng, ends, readings = random.Random(0), Counter[str](), []
    for first in range(0, episodes, BATCH):
        tasks = [
            asyncio.create_task(run_episode(context, plain if i % 2 else talks, id=f"e{i}", seed=i))
            for i in range(first, first + BATCH)
        ]
        await asyncio.sleep(0.05)
        for task in rng.sample(tasks, 5):
            task.cancel()
        server = servers[(first // BATCH) % 2]
        if first // BATCH % 10 == 9:
            server.kill()
            asyncio.get_running_loop().call_later(1.0, server.restart)  # the pool checks whether the server is back
        async with asyncio.timeout(3600):
            await asyncio.wait(tasks)
        for task in tasks:
            ends["cancelled" if task.cancelled() else task.result().stop_reason.value] += 1
        del tasks, task
        if (first + BATCH) % every == 0:
            readings.append((first + BATCH, rss_mib()))
    await context.engine.close()
    return {
        "episodes": episodes,
        "ends": dict(sorted(ends.items())),
        "mib_per_10k": round(slope_per_10k([r for r in readings if r[0] >= warm_up]), 3),
        "rss_mib": [round(mib, 1) for _, mib in readings],
        "left": len(box.live_ids) + len(user.live) + context.num_live_interactions + len(asyncio.all_tasks()) - 1,
    }


def problems(result: dict[str, Any]) -> list[str]:
    """Return a sentence for each missed target."""
    sentences = [f"{result['left']} instances and tasks are left"] * bool(result["left"])
    if not result["mib_per_10k"] < MAX_MIB_PER_10K:
        sentences.append(f"10,000 episodes add {result['mib_per_10k']} MiB; at most {MAX_MIB_PER_10K} may be")
    return sentences


def main() -> None:
    """Run the benchmark and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=EPISODES)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    began = time.monotonic()
    result = run_virtual(soak(options.episodes, warm_up=min(WARM_UP, options.episodes // 4)))
    result["seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(result))
    if sentences := problems(result):
        sys.exit("; ".join(sentences))


if __name__ == "__main__":
    main()
