"""Compares 512 concurrent episodes with a blocking scheduler to one episode's critical path. Prints one JSON line.

    python benchmarks/scheduler_threads.py [--episodes 512] [--turns 4]

Each episode has a copy of the scheduler, whose synchronous `step` blocks its thread for 50 ms. Nothing else costs time, so a
single episode takes turns x 50 ms. All together should take at most 1.5 times that, plus 2 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing.episodes import scripted_context, task

SLEEP_S = 0.05


class Sleeps(MultiTurnScheduler):
    """A scheduler that blocks its thread in every step."""

    def step(self, episode: Any, turn: Any) -> str:
        time.sleep(SLEEP_S)
        return "go on"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--turns", type=int, default=4)
    args = parser.parse_args()
    context = scripted_context(["some words"], scheduler=Sleeps(), limits=Limits(max_turns=args.turns), sanity_every=0)

    async def run(count: int) -> float:
        began = time.perf_counter()
        episodes = (run_episode(context, task(data_source=None), id=f"e{i}") for i in range(count))
        assert all(len(t.turns) == args.turns and not t.is_failed for t in await asyncio.gather(*episodes))
        return time.perf_counter() - began

    async def both() -> tuple[float, float]:
        await run(1)
        return await run(1), await run(args.episodes)

    alone, together = asyncio.run(both())
    result = {
        "benchmark": "scheduler_threads",
        "episodes": args.episodes,
        "turns": args.turns,
        "critical_path_s": round(alone, 3),
        "together_s": round(together, 3),
        "allowed_s": round(1.5 * alone + 2, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
