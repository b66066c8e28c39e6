"""Measures bytes and CPU time per trajectory in the controller of a run with workers and ranks. Prints one JSON line.

    python benchmarks/driver_bytes.py [--repeats 50]

It pickles groups of eight conversations of `rollout_loop.py` as a worker sends them, and their samples as a rank receives
them. `bytes_in` and `us_in` are for an arriving trajectory, by its content, and `bytes_in_journal` for the earlier journal
messages of its episode. `bytes_out` and `us_out` are for its samples in one command to the ranks (a step without reference,
critic and staleness has one command).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import pickle
import time
from collections.abc import Callable

import numpy as np
import rollout_loop
from rollout_loop import ANSWER, context_of, prompt_of

from polyturn.batching.samples import to_samples
from polyturn.cluster.journal import ResumeState, WorkerJournal
from polyturn.core.trajectory import SpanSource, TrajectoryGroup
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.rollout.limits import Limits
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.testing.episodes import task

SIZE = 8
CASES = ((70, 3), (1000, 8), (4000, 8))
"""(Number of prompt tokens, number of turns)."""


def group_of(prompt_tokens: int, turns: int) -> tuple[TrajectoryGroup, int]:
    """Return one group of eight, and the bytes of its episodes' messages to the controller's journal."""
    rollout_loop.TURNS = turns  # read by the limits of the context
    context = context_of(ANSWER, interactions={"gsm8k": Gsm8kInteraction({})})
    assert context.limits == Limits(max_turns=turns)
    one = task(prompt_of(prompt_tokens, seed=1), id="t", ground_truth="7", interaction="gsm8k")
    journal = WorkerJournal()
    journal.hand(ResumeState({}, None))

    async def run() -> tuple[TrajectoryGroup, int]:
        num_bytes = 0

        async def carry() -> None:
            nonlocal num_bytes
            received = 0
            while True:
                posts = await journal.posts(received)
                num_bytes, received = num_bytes + len(pickle.dumps(posts, protocol=5)), posts[-1].number

        carrying = asyncio.create_task(carry())
        pool = RolloutPool(dataclasses.replace(context, journal=journal))
        group = await pool.run_one(GroupSpec(id="g1", task=one, size=SIZE))
        carrying.cancel()
        return group, num_bytes

    return asyncio.run(run())


def microseconds(work: Callable[[], object], repeats: int) -> float:
    """Return the CPU time of one call, per member of a group."""
    began = time.process_time()
    for _ in range(repeats):
        work()
    return round(1e6 * (time.process_time() - began) / repeats / SIZE, 1)


def costs(group: TrajectoryGroup, journal_bytes: int, repeats: int) -> dict[str, float]:
    """Return the cost of one trajectory of a group."""
    arrived = pickle.dumps(group, protocol=5)
    samples = [
        s.replace(advantages=s.loss_weights * np.float32(0.7)) for s in to_samples(pickle.loads(arrived), temperature=1.0)
    ]
    sent = pickle.dumps(samples, protocol=5)
    spans = [span for segment in group.trajectories[0].segments for span in segment.spans]
    own = [span for span in spans if span.source is not SpanSource.PROMPT]
    return {
        "tokens": sum(map(len, spans)),
        "tokens_behind_prompt": sum(map(len, own)),
        "bytes_in": len(arrived) // SIZE,
        "bytes_in_journal": journal_bytes // SIZE,
        "bytes_in_of_ids_and_logprobs": sum(s.ids.nbytes + (0 if s.logprobs is None else s.logprobs.nbytes) for s in own),
        "us_in": microseconds(lambda: pickle.loads(arrived), repeats),
        "bytes_out": len(sent) // SIZE,
        "us_out": microseconds(lambda: pickle.dumps(samples, protocol=5), repeats),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    rows = [costs(*group_of(tokens, turns), args.repeats) for tokens, turns in CASES]
    print(json.dumps({"benchmark": "driver_bytes", "group_size": SIZE, "trajectories": rows}))


if __name__ == "__main__":
    main()
