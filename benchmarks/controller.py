"""Measures the work of a run's controller with two ranks, and how long the ranks wait. Prints one JSON line.

    python benchmarks/controller.py [--steps 8] [--hidden 256] [--layers 8]

It runs `examples/quickstart` with a larger model of random weights and `train.distributed.ranks=2`. `memory_bytes`
are the bytes per trajectory of the commands to the ranks, in shared memory. `idle_share` is the share of a step in which an
update was running but the ranks had no command (target 5 %), because samples, advantages and coefficients were being
prepared. `controller_cpu_s` and `ranks_cpu_s` are CPU seconds per step; the latter of one rank.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from polyturn.api.folders import open_source
from polyturn.api.training import RunOptions, run_training
from polyturn.cluster import rank_processes
from polyturn.infra.array_socket import Packed
from polyturn.tracking.jsonl import read_metrics
from polyturn.training.update import Update

CONFIG = Path(__file__).parents[1] / "examples/quickstart/config.yaml"
SETTINGS = (
    *("train.distributed.ranks=2", "warm_start.steps=0", "evaluation.every=0", "evaluation.before=false"),
    *("evaluation.data=null", "num_threads=1", "algorithm.drop_zero_variance=false", "train.checkpoint_every=0"),
)


class Counted(rank_processes.RankProcesses):
    """Counts the bytes sent to the ranks, and how long they had a command."""

    memory = 0
    busy_s = 0.0
    of: Counted

    def __init__(self, *arguments: Any, **options: Any) -> None:
        Counted.of = self
        super().__init__(*arguments, **options)

    def call(self, command: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run a command and count its time."""
        began = time.perf_counter()
        try:
            return super().call(command, shares)
        finally:
            self.busy_s += time.perf_counter() - began

    def _send(self, packed: Sequence[Packed]) -> None:
        self.memory += sum(os.fstat(one.fd).st_size for one in packed)
        super()._send(packed)

    def cpu_s(self) -> float:
        """Return the CPU seconds of the first rank so far."""
        fields = Path(f"/proc/{self.pids[0]}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    rank_processes.RankProcesses = Counted  # type: ignore[misc]
    idle: list[float] = []
    marks: list[dict[str, float]] = []
    plain = Update.run

    def run(self: Update, *arguments: Any, **options: Any) -> Any:
        began, busy = time.perf_counter(), Counted.of.busy_s
        try:
            return plain(self, *arguments, **options)
        finally:
            idle.append(time.perf_counter() - began - (Counted.of.busy_s - busy))

    def on_step(step: int, metrics: Any) -> None:
        ranks = Counted.of
        marks.append({"controller": time.process_time(), "ranks": ranks.cpu_s(), "memory": ranks.memory})

    Update.run = run  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        init = f"model.init={{model_type: qwen3, hidden_size: {args.hidden}, num_hidden_layers: {args.layers}}}"
        source, resolved = open_source(CONFIG, [*SETTINGS, init, f"train.steps={args.steps}", f"out={folder}"])
        run_training(source, resolved, RunOptions(again=str, on_step=on_step))
        steps = [m for m in read_metrics(Path(folder) / source.config.name / "metrics.jsonl") if "time/step_s" in m]
    per_step = source.config.train.groups_per_step * source.config.train.group_size

    def each(name: str) -> float:
        return median(later[name] - sooner[name] for sooner, later in itertools.pairwise(marks))

    figures = {
        "step_s": round(median(s["time/step_s"] for s in steps[1:]), 2),
        "idle_share": round(median(i / s["time/step_s"] for i, s in zip(idle[1:], steps[1:], strict=True)), 4),
        "controller_cpu_s": round(each("controller"), 2),
        "ranks_cpu_s": round(each("ranks"), 2),
        "memory_bytes": round(each("memory") / per_step),
        "trajectories": per_step,
    }
    print(json.dumps({"benchmark": "controller", "ranks": 2, "hidden": args.hidden, "layers": args.layers, **figures}))


if __name__ == "__main__":
    main()
