"""Episodes per second with fixed numbers in flight, and with a number that follows the engine's load. Prints one JSON line.

    python benchmarks/adaptive_concurrency.py [--repeats 3] [--episodes 96]

A tiny random model with 16 slots runs episodes of four turns of 32 tokens, after prompts of about 200 tokens. Between two
turns an episode waits for its environment: up to 0.2 seconds, depending on its seed, and up to 2 seconds in a second game.
With few episodes in flight, the engine's slots stay empty while episodes wait. With many, requests queue and conversations
lose their slots, so that their tokens are computed again. The best fixed number depends on the environment; the adaptive
setting should be close to it in both. The settings alternate, so that other work on the machine affects all of them, and
each begins with episodes that are not measured, in which the adaptive number settles. `prefilled` counts the computed prompt
tokens, which do not depend on other work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from statistics import median
from typing import Any

import torch

from polyturn.core.generation import SamplingParams
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.rollout.limits import Limits
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing.episodes import scripted_context, task, tiny_codec
from support.models import tiny_model

TURNS, TOKENS, SLOTS = 4, 32, 16
WAITS_S = (0.2, 2.0)
FIXED = (8, 16, 32, 64)
LEAST, MOST = 4, 64
TEXT = "She has 3 apples and buys 4 more, how many apples does she have now? " * 6


class Slow(MultiTurnScheduler):
    """A scheduler that runs all turns of the plan, and waits before each answer."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s

    def check_finished(self, episode: Any, turn: Any) -> None:
        """Continue after a completion that was cut by its length limit."""

    async def step(self, episode: Any, turn: Any) -> str:
        """Wait like an environment."""
        await asyncio.sleep(random.Random(f"{episode.id} {turn.index}").uniform(0, self.wait_s))
        return "Go on."


def run(model: Any, *, wait_s: float, most: int, least: int | None, episodes: int) -> dict[str, float]:
    """Run all episodes once; return episodes per second and the number of prefilled tokens."""

    async def main() -> dict[str, float]:
        engine = EmbeddedEngine(model, num_slots=SLOTS, max_context=1024)
        limits = Limits(max_turns=TURNS, max_tokens_per_turn=TOKENS, max_context=1024)
        context = scripted_context(
            [], limits=limits, scheduler=Slow(wait_s), rewards={"none": lambda trajectory: 0.0}, sanity_every=0
        )
        context.engine, context.sampling = engine, SamplingParams(max_tokens=TOKENS)
        pool = RolloutPool(context, max_concurrent=most, min_concurrent=least)
        specs = [
            GroupSpec(id=f"g{i}", task=task(f"{i}. {TEXT}", id=f"t{i}", data_source="none")) for i in range(2 * episodes)
        ]
        await pool.run(specs[:episodes])
        begin = time.perf_counter()
        groups = await pool.run(specs[episodes:])
        seconds = time.perf_counter() - begin
        await engine.close()
        trajectories = [t for group in groups for t in group.trajectories]
        assert all(t.error is None and len(t.turns) == TURNS for t in trajectories), trajectories[0].error
        return {"rate": episodes / seconds, "prefilled": sum(t.metrics["prefilled_tokens"] for t in trajectories) / episodes}

    return asyncio.run(main())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=96)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = tiny_model(len(tiny_codec().tokenizer), hidden=128, layers=4, heads=4, kv_heads=2, intermediate=384)
    bounds: dict[str, tuple[int, int | None]] = {str(n): (n, None) for n in FIXED} | {"auto": (MOST, LEAST)}
    run(model, wait_s=0.0, most=MOST, least=None, episodes=SLOTS)  # warm-up
    figures = {}
    for wait_s in WAITS_S:
        results: dict[str, list[dict[str, float]]] = {name: [] for name in bounds}
        for _ in range(arguments.repeats):
            for name, (most, least) in bounds.items():
                results[name].append(run(model, wait_s=wait_s, most=most, least=least, episodes=arguments.episodes))
        rates = {name: round(median(one["rate"] for one in each), 2) for name, each in results.items()}
        prefilled = {name: round(median(one["prefilled"] for one in each)) for name, each in results.items()}
        best = max(FIXED, key=lambda n: rates[str(n)])
        figures[f"wait up to {wait_s} s"] = {
            "episodes_per_s": rates,
            "prefilled_per_episode": prefilled,
            "best_fixed": best,
            "auto_over_best_fixed": round(rates["auto"] / rates[str(best)], 3),
            "auto_over_most": round(rates["auto"] / rates[str(MOST)], 3),
        }
    print(json.dumps({"benchmark": "adaptive_concurrency", **figures}))


if __name__ == "__main__":
    main()
