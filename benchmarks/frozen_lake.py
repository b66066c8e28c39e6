"""Checks that examples/frozen_lake learns, by training it from scratch. Prints one JSON line.

    python benchmarks/frozen_lake.py [--seeds 0] [--threads 2] [--out DIR]

It measures the success on 256 lakes that are not in training, before reinforcement learning (the imitation of a beginner)
and after it. The claim is that success at least doubles, sampled at temperature 1 and decoded greedily; otherwise the exit
code is 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def train(seed: int, out: Path, threads: int) -> dict[str, Any]:
    """Train one seed and return its success before and after, by evaluation set."""
    began = time.perf_counter()
    command = ["train", "examples/frozen_lake/config.yaml", f"out={out}", f"name=seed-{seed}", f"seed={seed}"]
    program = Path(sys.executable).with_name("polyturn")
    subprocess.run([program, *command, f"num_threads={threads}"], cwd=ROOT, check=True, stdout=sys.stderr)
    series: dict[str, list[float]] = {}
    for line in (out / f"seed-{seed}" / "metrics.jsonl").read_text().splitlines():
        for key, value in json.loads(line).items():
            if key.startswith("eval/") and key.endswith("/success"):
                series.setdefault(key.split("/")[1], []).append(value)
    ends = {name: {"before": values[0], "after": values[-1]} for name, values in series.items()}
    return {"seed": seed, "seconds": round(time.perf_counter() - began), **ends}


def main() -> int:
    """Train, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runs = [train(seed, args.out or Path(scratch), args.threads) for seed in args.seeds]
    doubled = all(r[name]["after"] >= 2 * r[name]["before"] for r in runs for name in r if isinstance(r[name], dict))
    print(json.dumps({"benchmark": "frozen_lake", "runs": runs, "at_least_doubled": doubled}))
    return 0 if doubled else 1


if __name__ == "__main__":
    sys.exit(main())
