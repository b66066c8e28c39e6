"""Measures the CPU time of the viewer's pages on a run of 100,000 trajectories and one of 5,000 steps. Prints one JSON line.

    python benchmarks/viewer_pages.py [--trajectories 100000] [--steps 5000]

Trajectories of the demo's size are written as a run of that length writes them: 128 a step, small parts joined. Then one
process makes the requests of a first visit: opening the run, the first page of the table, a filter, a sort, the groups, one
trajectory, a search for words and for an expression (and the first search, which reads the texts), the tables of tools and
results, and a poll without news; for the metrics, opening them and ten curves, with the bytes sent. Figures are medians of
seven, in CPU time of all threads, which hardly depends on other work on the machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from store_cost import make_groups

from polyturn.core.trajectory import TrajectoryGroup
from polyturn.store.parquet_store import ParquetStore
from polyturn.viewer.curves import Window
from polyturn.viewer.run_view import RunView

TARGETS_MS = {"open_curves_ms": 1000.0, "first_search_ms": 2000.0}
REPEATS = 7
clock = time.process_time


def write_run(folder: Path, count: int) -> None:
    """Write a run of `count` trajectories."""
    groups = make_groups()
    per_step = sum(len(g.trajectories) for g in groups)
    with ParquetStore(folder) as store:
        for step in range(-(-count // per_step)):
            for group in groups:
                named = [dataclasses.replace(t, id=f"{step}-{t.id}") for t in group.trajectories]
                record = TrajectoryGroup(id=f"{step}-{group.id}", task=group.task, trajectories=tuple(named))
                store.add(record, step=step, split="train")
            store.flush()


def write_metrics(folder: Path, steps: int, *, num_metrics: int = 200) -> int:
    """Write metrics of `steps` steps, with as many per step as a run with tools; return the size of the file in bytes."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step, values in enumerate(rng.normal(size=(steps, num_metrics)).tolist(), 1):
            line = {"step": step, "reward/mean": values[0], "time/step_s": 2.0}
            file.write(json.dumps(line | {f"tool/search/m{i}": value for i, value in enumerate(values)}) + "\n")
    return (folder / "metrics.jsonl").stat().st_size


def curve_times(folder: Path, steps: int) -> dict[str, float]:
    """Return the CPU milliseconds until the first curves of a long run are available, and of later ones."""
    size = write_metrics(folder, steps)
    names = ["reward/mean", *(f"tool/search/m{i}" for i in range(9))]
    began = clock()
    view = RunView(folder)
    view.summary()
    view.metrics()
    drawn = view.curves(names, Window())
    opened = round(1000 * (clock() - began), 1)
    smooth = timed(lambda: view.curves(names, Window(smoothing=0.9)))
    sent = len(json.dumps(drawn))
    return {"open_curves_ms": opened, "ten_smooth_curves_ms": smooth, "curves_bytes": sent, "metrics_bytes": size}


def timed(call: Callable[[], Any]) -> float:
    """Return the median CPU milliseconds of a call."""
    spent = []
    for _ in range(REPEATS):
        began = clock()
        call()
        spent.append(1000 * (clock() - began))
    return round(median(spent), 1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=5000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        folder.mkdir()
        began = clock()
        write_run(folder, args.trajectories)
        written = clock() - began
        began = clock()
        view = RunView(folder)
        figures = {"open_run_ms": round(1000 * (clock() - began), 1)}
        total = view.page({})["total"]
        began = clock()
        view.page({"text": "apples"})
        figures["first_search_ms"] = round(1000 * (clock() - began), 1)
        middle = view.page({}, offset=total // 2, limit=1)["rows"][0]
        pages: dict[str, Callable[[], Any]] = {
            "first_page_ms": lambda: view.page({}, descending=True),
            "filter_ms": lambda: view.page({"min_reward": "1", "stop_reason": "stop"}),
            "sql_ms": lambda: view.page({"where": "reward > 0 and num_turns = 3"}),
            "words_ms": lambda: view.page({"text": "apples seven"}),
            "expression_ms": lambda: view.page({"text": "#### -?[0-9]+$", "regex": "1"}),
            "sort_ms": lambda: view.page({}, sort="num_sampled_tokens", descending=True),
            "groups_ms": lambda: view.groups({"split": "train"}),
            "trajectory_ms": lambda: view.trajectory(middle["id"], step=middle["step"], split=middle["split"]),
            "advantage_ms": lambda: view.advantage(middle["id"], step=middle["step"], split=middle["split"]),
            "overview_ms": view.overview,
            "poll_ms": view.summary,
        }
        figures |= {name: timed(call) for name, call in pages.items()}
        figures |= curve_times(Path(name) / "long", args.steps)
        size = sum(p.stat().st_size for p in folder.rglob("*.parquet"))
        parts = len(list(folder.rglob("*.parquet")))
    line = {"benchmark": "viewer_pages", "trajectories": total, "parts": parts, "bytes_per_trajectory": round(size / total)}
    print(json.dumps({**line, "write_s": round(written, 1), **figures, "targets_ms": TARGETS_MS}))


if __name__ == "__main__":
    main()
