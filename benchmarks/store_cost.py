"""CPU time that recording adds to a training step. Prints one JSON line.

    python benchmarks/store_cost.py [--repeats 15]

128 trajectories of the demo's size (16 groups of 8; about 150 tokens in 3 turns, half of them sampled, with a tool call,
feedback and scores) are added and flushed as one part, as once per training step. CPU seconds of this process, all its
threads, with the bytes on disk; beside them the time to read all of them back as trajectories.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.engines.scripted import ScriptedEngine
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.rollout.group import GroupSpec
from polyturn.rollout.limits import Limits
from polyturn.rollout.pool import RolloutPool
from polyturn.store.parquet_store import ParquetStore
from polyturn.store.stored_run import open_store
from polyturn.testing.episodes import scripted_context, task, turn_ids
from polyturn.testing.tiny import tiny_tokenizer
from polyturn.tokens.codec import Codec
from polyturn.tools.gsm8k import Gsm8kTool

TEMPLATE = Path(__file__).parents[1] / "examples/quickstart/chat_template.jinja"
GROUPS, GROUP_SIZE = 16, 8
TARGET_MS = 50.0
SAYS = (
    '<tool_call>\n{"name": "calc_gsm8k_reward", "arguments": {"answer": "8"}}\n</tool_call>',
    "3 + 4 = 8\n#### 8",
    "3 + 4 = 7\n#### 7",
)


def make_groups() -> list[TrajectoryGroup]:
    """Return one step's groups, from real episodes with a scripted model."""
    rng = np.random.default_rng(0)

    def answer(request: GenerateRequest) -> Completion:
        ids = turn_ids(SAYS[int(request.request_id.rpartition("/")[2])])
        logprobs = -rng.exponential(0.3, len(ids)).astype(np.float32)  # that do not compress, as a model's
        return Completion(token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.STOP)

    context = scripted_context(
        [], tools=[Gsm8kTool({})], interactions={"gsm8k": Gsm8kInteraction({})}, limits=Limits(max_turns=4)
    )
    context.engine = ScriptedEngine(answer)
    context.codec = Codec(tiny_tokenizer(), chat_template=TEMPLATE.read_text())
    tasks = [task(f"{i} apples and 4 more?", id=f"t{i}", ground_truth="7", interaction="gsm8k") for i in range(GROUPS)]
    specs = [GroupSpec(id=f"g{i}", task=t, size=GROUP_SIZE) for i, t in enumerate(tasks)]
    return asyncio.run(RolloutPool(context).run(specs))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    groups = make_groups()
    trajectories = [t for g in groups for t in g.trajectories]
    assert all(len(t.turns) == 3 for t in trajectories)
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        store = ParquetStore(Path(folder))
        for step in range(args.repeats + 1):
            began = time.process_time()
            for group in groups:
                store.add(group, step=step, split="train")
            store.flush()
            if step:
                seconds.append(time.process_time() - began)
        size = sum(p.stat().st_size for p in Path(folder).rglob("*.parquet")) / (args.repeats + 1)
        began = time.process_time()
        read = list(open_store(Path(folder)).trajectories(step=0))
        read_s = time.process_time() - began
        assert all(a.same_as(b) for a, b in zip(read, trajectories, strict=True))
    result = {
        "benchmark": "store_cost",
        "trajectories": len(trajectories),
        "tokens_per_trajectory": round(sum(len(s) for t in trajectories for s in t.segments) / len(trajectories)),
        "record_ms": round(1000 * median(seconds), 1),
        "record_us_per_trajectory": round(1e6 * median(seconds) / len(trajectories)),
        "bytes_per_trajectory": round(size / len(trajectories)),
        "read_ms": round(1000 * read_s, 1),
        "target_ms": TARGET_MS,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
