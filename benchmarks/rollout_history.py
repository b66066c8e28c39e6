"""Compares the cost of a turn after a history of 32,000 tokens with one after 1,000 tokens. Prints one JSON line.

    python benchmarks/rollout_history.py [--repeats 25]

One episode runs at a time, with a scripted engine, the GSM8K interaction and 24 turns. The measured time is that between two
requests to the engine: parsing and recording the completion, the interaction's reply, encoding it, limits, and building the
request. The prompt is encoded before the clock starts. Both lengths alternate within one run, and the figure is the median
over adjacent episodes of the ratio of their median turns, in CPU seconds, so a busy machine has little effect.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from statistics import median

import numpy as np
from rollout_loop import ANSWER, prompt_of

from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.engines.scripted import ScriptedEngine
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task, turn_ids

TURNS = 24
HISTORIES = (1_000, 32_000)
TARGET = 1.2


def episode_of(history: int) -> list[float]:
    """Run one episode and return the CPU seconds between successive requests to the engine."""
    ids = turn_ids(ANSWER)
    completion = Completion(token_ids=ids, logprobs=-np.ones(len(ids), np.float32), finish_reason=FinishReason.STOP)
    at: list[float] = []
    lengths: list[int] = []

    def answer(request: GenerateRequest) -> Completion:
        at.append(time.thread_time())
        lengths.append(len(request.prompt_ids))
        return completion

    partner = Gsm8kInteraction({})
    context = scripted_context([], interactions={"gsm8k": partner}, limits=Limits(max_turns=TURNS), sanity_every=0)
    context.engine = ScriptedEngine(answer)
    one = task(prompt_of(history, seed=1), ground_truth="7", interaction="gsm8k")
    trajectory = asyncio.run(run_episode(context, one, id="e"))
    assert len(trajectory.turns) == TURNS
    assert 0.9 * history < lengths[0] < 1.1 * history
    # The first turns fill caches and grow the buffer; they are not counted.
    return np.diff(at)[4:].tolist()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=25)
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    turns: dict[int, list[float]] = {history: [] for history in HISTORIES}
    for repeat in range(args.repeats + 1):
        for history in HISTORIES:
            seconds = median(episode_of(history))
            if repeat:
                turns[history].append(seconds)
    short, long = (turns[history] for history in HISTORIES)
    result = {
        "benchmark": "rollout_history",
        "turn_us": {str(history): round(1e6 * median(values), 1) for history, values in turns.items()},
        "ratio": round(median(b / a for a, b in zip(short, long, strict=True)), 3),
        "target": TARGET,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
