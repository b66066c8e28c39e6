"""Measures turns per second of the whole multi-turn loop, on one core, with a scripted engine. Prints one JSON line.

    python benchmarks/rollout_loop.py [--repeats 7]

Groups run through `RolloutPool` exactly as in training: scheduler, limits, engine request, decoding and parsing of the turn,
the GSM8K interaction, incremental encoding, recording, and the reward through the router. The token ids of every sixteenth
episode are checked against a full render, as by default. Only the model is missing. Every history starts at 1,000 tokens,
and each episode has 8 turns, all wrong, so that each gets feedback. A second figure is for episodes that call a tool in
every turn instead. Both wall and CPU seconds are shown; the rate uses CPU seconds of this process, which hardly depend on
other work on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from polyturn.core.generation import Completion, FinishReason
from polyturn.engines.scripted import ScriptedEngine
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.limits import Limits
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.testing.episodes import scripted_context, task, tiny_codec, turn_ids
from polyturn.tools.gsm8k import Gsm8kTool

TURNS = 8
GROUPS, GROUP_SIZE = 16, 8
HISTORY = 1000
TARGET = 2000
ANSWER = "She has 3 apples and buys 4 more, so that is 3 + 4 = 8 apples.\n#### 8"
CALL = '<tool_call>\n{"name": "calc_gsm8k_reward", "arguments": {"answer": "8"}}\n</tool_call>'


def prompt_of(num_tokens: int, *, seed: int) -> str:
    """Return a text of about `num_tokens` tokens."""
    sentence = f"Problem {seed}: she has 3 apples and buys 4 more, how many apples does she have now? "
    per = len(tiny_codec().encode(sentence * 8)) / 8
    return sentence * round(num_tokens / per)


def context_of(text: str, **options: Any) -> RolloutContext:
    """Return a context whose engine always returns `text`, at almost no cost."""
    ids = turn_ids(text)
    completion = Completion(token_ids=ids, logprobs=-np.ones(len(ids), np.float32), finish_reason=FinishReason.STOP)
    context = scripted_context([], limits=Limits(max_turns=TURNS), sanity_every=16, **options)
    context.engine = ScriptedEngine(lambda request: completion)
    return context


def rollouts(context: RolloutContext, *, with_partner: bool) -> Callable[[], int]:
    """Return a function that runs all groups once and returns their number of turns."""
    tasks = [
        task(prompt_of(HISTORY, seed=i), id=f"t{i}", ground_truth="7", interaction="gsm8k" if with_partner else None)
        for i in range(GROUPS)
    ]

    async def run() -> int:
        pool = RolloutPool(context, max_concurrent=64)
        groups = await pool.run(GroupSpec(id=f"g{i}", task=t, size=GROUP_SIZE) for i, t in enumerate(tasks))
        trajectories = [t for g in groups for t in g.trajectories]
        assert all(len(t.turns) == TURNS and t.error is None and t.reward is not None for t in trajectories)
        return sum(len(t.turns) for t in trajectories)

    return lambda: asyncio.run(run())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--profile", choices=["interaction", "tool"], help="print a profile instead")
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    variants = {
        "interaction": rollouts(context_of(ANSWER, interactions={"gsm8k": Gsm8kInteraction({})}), with_partner=True),
        "tool": rollouts(context_of(CALL, tools=[Gsm8kTool({})]), with_partner=False),
    }
    if args.profile:
        variants[args.profile]()
        with cProfile.Profile() as profile:
            variants[args.profile]()
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        return
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for repeat in range(args.repeats + 1):
        for name, run in variants.items():
            wall, cpu = time.perf_counter(), time.process_time()
            turns = run()
            if repeat:
                rates[name].append((turns / (time.process_time() - cpu), turns / (time.perf_counter() - wall)))
    result = {
        "benchmark": "rollout_loop",
        "history_tokens": HISTORY,
        "turns_per_episode": TURNS,
        "turns_per_cpu_s": {name: round(median(cpu for cpu, _ in values)) for name, values in rates.items()},
        "turns_per_wall_s": {name: round(median(wall for _, wall in values)) for name, values in rates.items()},
        "target": TARGET,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
