"""Steps per second with staleness 1 compared to staleness 0, when rollout and training take about equally long.

The embedded engine samples on the event loop in both settings, with one thread; with staleness 1 the trainer computes in a
second thread at the same time, so the two share the interpreter's lock. The delay of the event loop is reported too (99th
percentile). The number of trajectories is chosen first, so that rollout and training take equally long. Every run uses
a fresh process, and the settings alternate. Prints one JSON line (target 1.7).

    python benchmarks/async_speedup.py
    python benchmarks/async_speedup.py --steps 6 --repeats 1        a quick look
    python benchmarks/async_speedup.py --sums --steps 4             examples/sums with SmolLM2-135M: in turns with all cores,
                                                                    at once with one thread each
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from polyturn import build
from polyturn.api.folders import open_source
from polyturn.training.observer_base import Observer
from support.runs import write_tiny_run

TARGET = 1.7
WARM_STEPS = 2
SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16)
SUMS = Path(__file__).resolve().parent.parent / "examples/sums/config.yaml"
SUMS_SETTINGS = ["evaluation.data=null", "evaluation.before=false"]
SETTINGS = [
    "model.init.hidden_size=128",
    "model.init.num_hidden_layers=4",
    "model.init.num_attention_heads=4",
    "model.init.num_key_value_heads=2",
    "model.init.head_dim=32",
    "model.init.intermediate_size=384",
    "rollout.limits.max_tokens_per_turn=96",
    "rollout.sanity_every=0",
    "engine.num_slots=256",
    "evaluation.data=null",
    "evaluation.before=false",
    "algorithm.drop_zero_variance=false",
    # The embedded engine's logprobs equal the trainer's; without this, staleness costs another forward pass.
    "algorithm.old_logprobs=engine",
    # It repeats the forward pass in both settings: otherwise a rollout takes longer than training at every size.
    "model.gradient_checkpointing=true",
    "train.groups_per_step=4",
    "train.optim.lr=1e-6",
]


class Times(Observer):
    """An observer that records the end and the duration of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.metrics: list[dict[str, float]] = []

    def on_step(self, step: int, metrics: Any, groups: Any, trained: Any = None) -> None:
        """Record the end of a step."""
        self.ends.append(time.perf_counter())
        self.metrics.append(dict(metrics))


def run_once(*, staleness: int, size: int, steps: int, sums: bool) -> dict[str, float]:
    """Train in this process; return the seconds of a step and of its parts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, settings = (SUMS, SUMS_SETTINGS) if sums else (write_tiny_run(folder), SETTINGS)
        overrides = [
            *settings,
            f"num_threads={os.cpu_count() if sums and staleness == 0 else 1}",
            f"train.max_staleness={staleness}",
            f"train.group_size={size}",
            f"train.steps={steps + WARM_STEPS}",
        ]
        source, _ = open_source(config, overrides)
        parts, tasks = build.settle(build.build_parts(source), build.build_run_tasks(source))
        times = Times()
        trainer = build.build_trainer(parts, tasks, folder=folder / "run", observer=times)

        lags: list[float] = []

        async def watch() -> None:
            while True:
                began = time.perf_counter()
                await asyncio.sleep(0.002)
                lags.append(time.perf_counter() - began - 0.002)

        async def run() -> None:
            watching = asyncio.create_task(watch())
            await trainer.run()
            watching.cancel()
            await parts.engine.close()

        asyncio.run(run())
    measured = times.metrics[WARM_STEPS:]
    return {
        "step_s": (times.ends[-1] - times.ends[WARM_STEPS - 1]) / steps,
        "generate_s": median(m["time/generate_s"] for m in measured),
        "train_s": median(m["time/train_s"] for m in measured),
        "staleness": max(m["buffer/staleness"] for m in measured),
        "loop_lag_ms": 1000 * sorted(lags)[int(0.99 * len(lags))],
    }


def run_apart(*, staleness: int, size: int, steps: int, sums: bool = False) -> dict[str, float]:
    """Do the same in another process."""
    options = ["--one", f"--staleness={staleness}", f"--size={size}", f"--steps={steps}", *(["--sums"] if sums else [])]
    done = subprocess.run(
        [sys.executable, __file__, *options],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def balanced_size() -> int:
    """Return the group size at which the times of a step's rollout and training are closest."""
    ratios = {}
    for size in SIZES:
        one = run_apart(staleness=0, size=size, steps=2)
        ratios[size] = one["train_s"] / one["generate_s"]
        if ratios[size] > 1:
            break
    return min(ratios, key=lambda size: max(ratios[size], 1 / ratios[size]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--size", type=int, default=0, help="trajectories of a group; 0 looks for the balanced number")
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--sums", action="store_true", help="train examples/sums in place of a tiny model")
    parser.add_argument("--one", action="store_true")
    options = parser.parse_args()
    if options.one:
        one = run_once(staleness=options.staleness, size=options.size, steps=options.steps, sums=options.sums)
        print(json.dumps(one))
        return
    size = options.size or (8 if options.sums else balanced_size())
    runs: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    for _ in range(options.repeats):
        for staleness in runs:
            runs[staleness].append(run_apart(staleness=staleness, size=size, steps=options.steps, sums=options.sums))
    result = {
        "benchmark": "async_speedup",
        "model": "SmolLM2-135M" if options.sums else "tiny",
        "target": None if options.sums else TARGET,
        "group_size": size,
        "speedup": round(median(a["step_s"] / b["step_s"] for a, b in zip(runs[0], runs[1], strict=True)), 2),
        "step_s": {f"staleness_{k}": round(median(r["step_s"] for r in each), 3) for k, each in runs.items()},
        "generate_s": round(median(r["generate_s"] for r in runs[0]), 3),
        "train_s": round(median(r["train_s"] for r in runs[0]), 3),
        "staleness": max(r["staleness"] for r in runs[1]),
        "loop_lag_ms_p99": round(median(r["loop_lag_ms"] for r in runs[1]), 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
