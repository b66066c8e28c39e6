"""Kill a training run at random moments, many times, and let it go on: is a task skipped or repeated, how long is a resume?

    .venv/bin/python benchmarks/kill_resume.py --kills 100

Runs of a tiny model whose interaction takes a random time, one after another, each killed up to ten times by kill -9 within
a second or so of its first sign of life; asynchronous (max_staleness 1) and synchronous in turns. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from polyturn.testing.kills import Killed, kill_until_done
from polyturn.testing.runs import write_tiny_run

STEPS = 120
SETTINGS = ["evaluation.data=null", "warm_start.conversations=null", f"train.steps={STEPS}", "train.checkpoint_every=3"]


def one_run(folder: Path, *, kills: int, seed: int) -> Killed:
    """Kill and resume one run until it is done."""
    config = write_tiny_run(folder)
    plugins = (folder / "plugins.py").read_text()
    slow = "        import asyncio, os\n        await asyncio.sleep(0.02 * os.urandom(1)[0] / 255)\n        return False,"
    (folder / "plugins.py").write_text(plugins.replace("        return False,", slow))
    settings = [*SETTINGS, f"train.max_staleness={seed % 2}"]
    return kill_until_done(
        config, settings, run=folder / "runs" / "tiny", steps=STEPS, kills=kills, seed=seed, max_wait_s=1.0
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    runs: list[Killed] = []
    with tempfile.TemporaryDirectory() as temporary:
        while (left := options.kills - sum(run.kills for run in runs)) > 0:
            seed = options.seed + len(runs)
            found = one_run(Path(temporary) / str(seed), kills=min(10, left), seed=seed)
            runs.append(found)
            if found.problems or not found.kills:
                break
    resume_s = [seconds for run in runs for seconds in run.resume_s]
    line = {
        "benchmark": "kill_resume",
        "kills": sum(run.kills for run in runs),
        "runs": len(runs),
        "steps_per_run": STEPS,
        "problems": [problem for run in runs for problem in run.problems],
        "resumed_flights": sum(run.resumed_flights for run in runs),
        "restarted_flights": sum(run.restarted_flights for run in runs),
        "resume_s_median": round(statistics.median(resume_s), 3) if resume_s else None,
        "resume_s_max": round(max(resume_s), 3) if resume_s else None,
        "cpus": os.cpu_count(),
    }
    print(json.dumps(line))
    if line["problems"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
