"""Measures the CPU time that recording adds to a training step. Prints one JSON line.

    python benchmarks/store_cost.py [--repeats 15] [--run RUN]

128 trajectories of the demo's size (16 groups of 8; about 150 tokens in 3 turns, half of them sampled, with a tool call,
feedback and scores) are added and flushed as one part, as in a training step. Figures are CPU seconds of this process with
all threads, the bytes on disk, and the time to read all trajectories back.

With --run, the training trajectories of a finished run are recorded again step by step, with the results of training, and
the CPU seconds are divided by the run's `time/step_s`: the share of the run's time that its store costs.
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
import pyarrow.parquet as pq

from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.engines.scripted import ScriptedEngine
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.rollout.limits import Limits
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.store.parquet_store import ParquetStore
from polyturn.store.schema import StoredTrajectory
from polyturn.store.stored_run import open_store
from polyturn.testing.episodes import scripted_context, task, turn_ids
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.codec import Codec
from polyturn.tools.gsm8k import Gsm8kTool
from polyturn.tracking.jsonl import read_metrics

TEMPLATE = Path(__file__).parents[1] / "examples/quickstart/chat_template.jinja"
GROUPS, GROUP_SIZE = 16, 8
TARGET_MS = 50.0
PAYLOAD = ("ids.", "logprobs.", "policy_logprobs.", "trajectory", "texts.", "question")
"""Prefixes of the paths of columns with ids, logprobs and text; `trajectory` has texts and metadata."""
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
        # Random, so that they do not compress, like those of a model.
        logprobs = -rng.exponential(0.3, len(ids)).astype(np.float32)
        return Completion(token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.STOP)

    context = scripted_context(
        [], tools=[Gsm8kTool({})], interactions={"gsm8k": Gsm8kInteraction({})}, limits=Limits(max_turns=4)
    )
    context.engine = ScriptedEngine(answer)
    context.codec = Codec(tiny_tokenizer(), chat_template=TEMPLATE.read_text())
    tasks = [task(f"{i} apples and 4 more?", id=f"t{i}", ground_truth="7", interaction="gsm8k") for i in range(GROUPS)]
    specs = [GroupSpec(id=f"g{i}", task=t, size=GROUP_SIZE) for i, t in enumerate(tasks)]
    return asyncio.run(RolloutPool(context).run(specs))


def beyond(folder: Path, num_turns: int) -> dict[str, float]:
    """Return the bytes on disk per turn: in total, and without the columns of ids, logprobs and text."""
    data = total = 0
    for path in folder.rglob("*.parquet"):
        about = pq.ParquetFile(path).metadata
        total += path.stat().st_size
        for i in range(about.num_row_groups):
            group = about.row_group(i)
            columns = (group.column(j) for j in range(group.num_columns))
            data += sum(c.total_compressed_size for c in columns if c.path_in_schema.startswith(PAYLOAD))
    return {
        "bytes_per_turn": round(total / num_turns),
        "bytes_per_turn_beyond_ids_logprobs_text": round((total - data) / num_turns),
    }


def replay(run: Path) -> dict[str, object]:
    """Return the cost of recording the training steps of a run, as a share of their seconds."""
    took = {s["step"]: s.get("time/step_s") for s in read_metrics(run / "metrics.jsonl")}
    steps: dict[int, dict[str, list[StoredTrajectory]]] = {}
    for record in open_store(run).select(split="train").records():
        if took.get(record.step):
            steps.setdefault(record.step, {}).setdefault(record.group, []).append(record)
    num_turns = sum(len(r.trajectory.turns) for groups in steps.values() for rs in groups.values() for r in rs)
    spent = 0.0
    with tempfile.TemporaryDirectory() as folder:
        store = ParquetStore(Path(folder))
        for step, groups in sorted(steps.items()):
            recorded = {
                name: TrajectoryGroup(id=name, task=rs[0].trajectory.task, trajectories=tuple(r.trajectory for r in rs))
                for name, rs in groups.items()
            }
            trained = {r.trajectory.id: r.trained for rs in groups.values() for r in rs}
            began = time.process_time()
            for group in recorded.values():
                store.add(group, step=step, split="train", trained=trained)
            store.flush()
            spent += time.process_time() - began
        sizes = beyond(Path(folder), num_turns)
    seconds = sum(took[step] or 0.0 for step in steps)
    return {
        "run_steps": len(steps),
        "run_step_ms": round(1000 * seconds / len(steps)),
        "run_record_ms_per_step": round(1000 * spent / len(steps), 1),
        "share_of_step": round(spent / seconds, 4),
        "target_share": 0.03,
        **{f"run_{name}": value for name, value in sizes.items()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--run", type=Path, help="A finished run whose trajectories are recorded once more.")
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
        sizes = beyond(Path(folder), sum(len(t.turns) for t in trajectories) * (args.repeats + 1))
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
        **sizes,
        "target_bytes_beyond": 300,
        **({} if args.run is None else replay(args.run)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
