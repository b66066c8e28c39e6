"""How long the viewer's pages take on a run of 100,000 trajectories. Prints one JSON line.

    python benchmarks/viewer_pages.py [--trajectories 100000]

Trajectories of the demo's size are written as a run of that length writes them: 128 a step, small parts joined. Then the
requests of a first visit are made, in one process, the median of seven: opening the run, the first page of the table, a
filter, a sort, the groups, one trajectory, what a poll costs while nothing is new.
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

from store_cost import make_groups

from polyturn.core.trajectory import TrajectoryGroup
from polyturn.store.parquet_store import ParquetStore
from polyturn.viewer.run_view import RunView

TARGET_MS = 1000.0
REPEATS = 7


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


def timed(call: Callable[[], Any]) -> float:
    """Return the median milliseconds of a call."""
    spent = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        spent.append(1000 * (time.perf_counter() - began))
    return round(median(spent), 1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=100_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.perf_counter()
        write_run(folder, args.trajectories)
        written = time.perf_counter() - began
        began = time.perf_counter()
        view = RunView(folder)
        found = {"open_run_ms": round(1000 * (time.perf_counter() - began), 1)}
        total = view.page({})["total"]
        middle = view.page({}, offset=total // 2, limit=1)["rows"][0]
        pages: dict[str, Callable[[], Any]] = {
            "first_page_ms": lambda: view.page({}, descending=True),
            "filter_ms": lambda: view.page({"min_reward": "1", "text": "apples", "errors": ""}),
            "sql_ms": lambda: view.page({"where": "reward > 0 and num_turns = 3"}),
            "sort_ms": lambda: view.page({}, sort="num_sampled_tokens", descending=True),
            "groups_ms": lambda: view.groups({"split": "train"}),
            "trajectory_ms": lambda: view.trajectory(middle["id"], step=middle["step"], split=middle["split"]),
            "poll_ms": view.summary,
        }
        found |= {name: timed(call) for name, call in pages.items()}
        size = sum(p.stat().st_size for p in folder.rglob("*.parquet"))
        parts = len(list(folder.rglob("*.parquet")))
    line = {"benchmark": "viewer_pages", "trajectories": total, "parts": parts, "bytes_per_trajectory": round(size / total)}
    print(json.dumps({**line, "write_s": round(written, 1), **found, "target_ms": TARGET_MS}))


if __name__ == "__main__":
    main()
