"""Measures the share of a run's wall time outside generation, forward and backward. Prints one JSON line.

    python benchmarks/train_step_share.py                     a short quick-start run, in this process
    python benchmarks/train_step_share.py runs/quickstart     the medians of an existing run, from its metrics.jsonl

It reports the median over training steps of `time/other_share` and of the parts of a step: generation (everything inside the
engine's steps), training (forward, backward, optimizer), preparing (metrics, filters, samples, advantages), and the rest,
which is the Python code of the rollout (episodes, templates, tools, rewards). `update_other_share` is the share of training
and preparing that is outside forward, backward and optimizer (target 10 %). For a run in this process
three more times are measured: recording, which happens after a step's metrics are complete; generation and training without
the work of engine and trainer around the model; and the whole run, from reading the config to the last checkpoint, with
evaluations. In it, costs that do not grow with the number of steps have more weight than in a run of full length.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from polyturn import build
from polyturn.api.folders import open_source
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.store.schema import Trained
from polyturn.tracking.jsonl import read_metrics
from polyturn.training.observer import RunObserver
from polyturn.training.options import SftOptions
from polyturn.training.sft import run_sft

CONFIG = Path(__file__).parents[1] / "examples/quickstart/config.yaml"
SHORT = [
    "train.steps=6",
    "warm_start.steps=60",
    "warm_start.kwargs.num_conversations=960",
    "evaluation.every=0",
    "evaluation.data.kwargs.num_tasks=64",
    "num_threads=1",
    # An untrained model has equal scores in many groups; these are trained too.
    "algorithm.drop_zero_variance=false",
]
TARGET = 0.15


def of_steps(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the medians of the training steps."""
    parts = {
        "generate": [s["time/generate_s"] / s["time/step_s"] for s in steps],
        "train": [s["time/train_s"] / s["time/step_s"] for s in steps],
        "prepare": [s.get("time/prepare_s", 0.0) / s["time/step_s"] for s in steps],
    }
    updates = [
        1 - (s["time/forward_backward"] + s["time/optim"]) / (s["time/train_s"] + s.get("time/prepare_s", 0.0))
        for s in steps
        if "time/optim" in s
    ]
    shares = {name: median(values) for name, values in parts.items()}
    shares["rollout_python"] = max(0.0, 1 - sum(shares.values()))
    return {
        "steps": len(steps),
        "step_s": round(median(s["time/step_s"] for s in steps), 2),
        "other_share": round(median(s["time/other_share"] for s in steps), 3),
        "made_of": {name: round(share, 3) for name, share in shares.items()},
        "update_other_share": round(median(updates), 3) if updates else None,
    }


class TimedObserver(RunObserver):
    """An observer that measures the time of recording after each step."""

    record_s: list[float]

    def on_step(
        self, step: int, metrics: Mapping[str, float], groups: Sequence[TrajectoryGroup], trained: Mapping[str, Trained]
    ) -> None:
        """Record a training step and its time."""
        began = time.perf_counter()
        super().on_step(step, metrics, groups)
        self.record_s.append(time.perf_counter() - began)


def run_here(overrides: list[str]) -> dict[str, Any]:
    """Run the quick start and return its shares."""
    began = time.perf_counter()
    source, _ = open_source(CONFIG, overrides)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = build.build_parts(source)
        tasks = build.build_run_tasks(source)
        build.check_training(parts, tasks)
        sft = source.config.warm_start
        samples = build.warm_start_samples(parts)
        start_s = time.perf_counter() - began
        warm = build.build_policy(parts, sft.optim.over(sft.steps), max_tokens_per_batch=sft.max_tokens_per_batch)
        run_sft(warm, samples, SftOptions(steps=sft.steps, batch_size=sft.batch_size))
        with TimedObserver(folder, total_steps=source.config.train.steps) as observer:
            observer.record_s = []
            trainer = build.build_trainer(parts, tasks, folder=folder, observer=observer)
            asyncio.run(trainer.run())
        wall = time.perf_counter() - began
        steps = [m for m in read_metrics(folder / "metrics.jsonl") if "time/step_s" in m]
    policy, stats = trainer.policy, parts.engine.stats
    trained_s = warm.train_seconds + warm.optim_seconds + policy.train_seconds + policy.optim_seconds
    step_s = sum(s["time/step_s"] for s in steps) + sum(observer.record_s)
    other_s = step_s - sum(s["time/generate_s"] + s["time/train_s"] for s in steps)
    return {
        **of_steps(steps),
        "record_ms": round(1000 * median(observer.record_s), 1),
        "other_share_with_recording": round(other_s / step_s, 3),
        "whole_run_s": round(wall, 1),
        "start_s": round(start_s, 1),
        "whole_run_share": round(1 - (stats.busy_s + trained_s) / wall, 3),
        "engine_outside_model_share": round(1 - (stats.forward_s + stats.sampling_s) / stats.busy_s, 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", type=Path, help="the folder of a run; without it a short one is made")
    parser.add_argument("--set", nargs="*", default=[], help="overrides of the short run, such as train.steps=12")
    args = parser.parse_args()
    if args.run is None:
        result = run_here([*SHORT, *args.set])
    else:
        result = of_steps([m for m in read_metrics(args.run / "metrics.jsonl") if "time/step_s" in m])
    print(json.dumps({"benchmark": "train_step_share", **result, "target": TARGET}))


if __name__ == "__main__":
    main()
