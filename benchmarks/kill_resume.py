"""Kills and resumes training runs at random moments; checks for skipped or repeated tasks, and measures the resume time.

    .venv/bin/python benchmarks/kill_resume.py --kills 100

A tiny model has conversations of four turns with an interaction that takes a random time and has a snapshot. One run at a
time is killed up to ten times by kill -9, within about two seconds of its first output. Asynchronous runs (max_staleness 1)
and synchronous ones alternate. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from support.crash_injection import Killed, kill_until_done
from support.runs import SEVERAL_TURNS, write_tiny_run

STEPS = 40
SETTINGS = [
    "evaluation.data=null",
    "warm_start.conversations=null",
    f"train.steps={STEPS}",
    "train.checkpoint_every=2",
    *SEVERAL_TURNS,
]
COACH = """\
class Coach(BaseInteraction):
    def __init__(self, config):
        super().__init__(config)
        self.counts = {}

    async def start_interaction(self, instance_id=None, **kwargs):
        self.counts[instance_id] = 0
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        import asyncio, os
        await asyncio.sleep(0.02 * os.urandom(1)[0] / 255)
        self.counts[instance_id] += 1
        said = sum(message["role"] == "user" for message in messages)
        if self.counts[instance_id] != said:
            raise ValueError(f"{instance_id}: {said} messages of a user and {self.counts[instance_id]} answers")
        return False, f"Say it again, for the {said}. time.", 0.5, {}

    async def snapshot(self, instance_id):
        return self.counts[instance_id]

    async def restore(self, instance_id, state):
        self.counts[instance_id] = state

    async def finalize_interaction(self, instance_id=None, **kwargs):
        self.counts.pop(instance_id, None)
"""
"""Code of an interaction that fails if a conversation does not continue from its state."""


def one_run(folder: Path, *, kills: int, seed: int) -> Killed:
    """Kill and resume one run until it ends."""
    config = write_tiny_run(folder)
    plugins = (folder / "plugins.py").read_text()
    head, _, tail = plugins.partition("class Coach")
    (folder / "plugins.py").write_text(head + COACH + tail[tail.index("\n\nclass GoesOn") :])
    settings = [*SETTINGS, f"train.max_staleness={seed % 2}", "rollout.max_failed_share=0.0"]
    return kill_until_done(
        config, settings, run=folder / "runs" / "tiny", steps=STEPS, kills=kills, seed=seed, max_wait_s=2.0
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
            result = one_run(Path(temporary) / str(seed), kills=min(10, left), seed=seed)
            runs.append(result)
            print(f"run {len(runs)}: {result}", file=sys.stderr, flush=True)
            if result.problems or not result.kills:
                break
    resume_s = [seconds for run in runs for seconds in run.resume_s]
    line = {
        "benchmark": "kill_resume",
        "kills": sum(run.kills for run in runs),
        "runs": len(runs),
        "steps_per_run": STEPS,
        "problems": [problem for run in runs for problem in run.problems],
        "resumed_episodes": sum(run.resumed_episodes for run in runs),
        "restarted_episodes": sum(run.restarted_episodes for run in runs),
        "resume_s_median": round(statistics.median(resume_s), 3) if resume_s else None,
        "resume_s_max": round(max(resume_s), 3) if resume_s else None,
        "cpus": os.cpu_count(),
    }
    print(json.dumps(line))
    if line["problems"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
