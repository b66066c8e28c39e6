"""Measures the cost of writing running conversations to disk after every turn.

    .venv/bin/python benchmarks/journal_cost.py

64 conversations run at once, with 8 turns each: 300 sampled tokens with logprobs, and a result of 200 characters from a tool
with snapshots. Runs with and without a journal alternate. The figures are CPU time of the process, which hardly depends on
other work on the machine, and bytes, including the line of each finished trajectory. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.engines.scripted import ScriptedEngine
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task, turn_ids
from polyturn.tools.base import BaseTool
from polyturn.training.journal_file import JournalFile

TURNS, TOKENS = 8, 300
CALL = '<tool_call>\n{"name": "count", "arguments": {}}\n</tool_call>'


class Count(BaseTool):
    """Counts its calls."""

    def __init__(self) -> None:
        empty = {"type": "object", "properties": {}}
        super().__init__({}, {"type": "function", "function": {"name": "count", "description": "x", "parameters": empty}})
        self.counts: dict[str, int] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        self.counts[str(instance_id)] = 0
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        self.counts[instance_id] += 1
        return f"{self.counts[instance_id]} " * 100

    async def snapshot(self, instance_id: str) -> int:
        return self.counts[instance_id]

    async def restore(self, instance_id: str, state: int) -> None:
        self.counts[instance_id] = state


def completion(ids: np.ndarray, rng: np.random.Generator) -> Completion:
    logprobs = -rng.exponential(size=len(ids)).astype(np.float32)
    return Completion(token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.STOP, policy_versions=((0, 0),))


def run(episodes: int, folder: Path | None) -> tuple[float, float, int]:
    """Run the conversations once; return CPU seconds, wall seconds and the journal's bytes."""
    rng = np.random.default_rng(0)
    tail = turn_ids(CALL)
    body = rng.integers(97, 122, TOKENS - len(tail)).astype(np.int32)
    says = [completion(np.concatenate([body, tail]), rng) for _ in range(TURNS)]

    def answer(request: GenerateRequest) -> Completion:
        return says[int(request.request_id.rpartition("/")[2])]

    journal = None if folder is None else JournalFile(folder)
    if journal is not None:
        journal.begin(0)
    limits = Limits(max_turns=TURNS, max_context=100_000)
    context = scripted_context(["x"], tools=[Count()], journal=journal, limits=limits, sanity_every=0)
    context.engine = ScriptedEngine(answer)

    async def all_of_them() -> None:
        subject = task(data_source="openai/gsm8k")
        await asyncio.gather(*(run_episode(context, subject, id=f"g{i}/0") for i in range(episodes)))

    cpu, wall = time.process_time(), time.perf_counter()
    asyncio.run(all_of_them())
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    if journal is not None:
        journal.close()
    size = 0 if folder is None else sum(path.stat().st_size for path in folder.iterdir())
    return cpu, wall, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    run(options.episodes, None)
    without, kept = [], []
    for _ in range(options.repeats):
        without.append(run(options.episodes, None))
        with tempfile.TemporaryDirectory() as folder:
            kept.append(run(options.episodes, Path(folder) / "journal"))
    turns = options.episodes * TURNS
    cpu = [1000 * (k[0] - w[0]) / turns for k, w in zip(kept, without, strict=True)]
    line = {
        "benchmark": "journal_cost",
        "episodes": options.episodes,
        "turns_each": TURNS,
        "tokens_a_turn": TOKENS,
        "cpu_ms_per_turn": round(statistics.median(cpu), 3),
        "cpu_ms_per_turn_without_journal": round(statistics.median(1000 * w[0] / turns for w in without), 3),
        "wall_ms_per_turn_without_journal": round(statistics.median(1000 * w[1] / turns for w in without), 3),
        "wall_ms_per_turn_with_journal": round(statistics.median(1000 * k[1] / turns for k in kept), 3),
        "bytes_per_turn": round(kept[0][2] / turns),
        "cpus": os.cpu_count(),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
