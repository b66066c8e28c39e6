"""Checks that the examples learn from their rewards: search and sandbox from scratch, others with SmolLM2. One JSON line.

    python benchmarks/example_learns.py [search] [sandbox] [--seeds 0] [--threads 2] [--controls shuffled]
    python benchmarks/example_learns.py sums calculator --seeds 0 1 2 --out runs/learns --plot docs/images/learning.webp
    python benchmarks/example_learns.py calculator --controls without_tool one_turn --out runs/learns

It measures the success on held-out tasks before and after reinforcement learning. `search` and `sandbox` imitate someone who
mostly answers without the tool, and so does `calculator`, which is SmolLM2 with 160 demonstrations; `sums` starts from
SmolLM2 itself. The controls of `CONTROLS` run with the first seed for `search` and `sandbox`, else with all seeds. The claim
is a greedy success of at most 60 % before and at least the share of `CLAIMS` after, with every control 20 points below;
otherwise the exit code is 1. A run that is finished in `--out` is not repeated, so several calls can share the work.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PROGRAM = str(Path(sys.executable).with_name("polyturn"))
PREPARED_BY = {
    "search": (
        (sys.executable, "people.py", "people.jsonl"),
        (PROGRAM, "data", "index", "people.jsonl", "--out", "people.index"),
    ),
    "sandbox": (),
    "sums": (),
    "calculator": (),
}
"""The examples, and the commands that come before training."""
PRETRAINED = ("sums", "calculator")
CLAIMS = {"search": 0.95, "sandbox": 0.95, "sums": 0.85, "calculator": 0.9}
"""Greedy success after training, at least."""
CONTROLS = {
    "shuffled": ("algorithm.advantage=../quickstart/controls.py:shuffled_grpo",),
    "without_tool": ("rollout.tools.functions=[]", "warm_start.kwargs.guess_share=1.0"),
    "one_turn": ("rollout.limits.max_turns=1",),
}
"""Control -> overrides: the rewards of a group in random order; no calculator, and no calls in its demonstrations; no turn
after the first."""


def prepare(example: str, scratch: Path) -> Path:
    """Copy an example and run its commands."""
    for name in (example, "quickstart"):
        leftovers = shutil.ignore_patterns("*.index", "people.jsonl", "runs")
        shutil.copytree(EXAMPLES / name, scratch / name, ignore=leftovers, dirs_exist_ok=True)
    for command in PREPARED_BY[example]:
        subprocess.run(command, cwd=scratch / example, check=True, stdout=sys.stderr)
    return scratch / example


def figures(run: Path) -> dict[str, Any]:
    """Success before and after training by evaluation set, and the success of each step's episodes."""
    evaluations: dict[str, list[float]] = {}
    steps: list[float] = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "reward/mean" in row:
            steps.append(round(row["reward/mean"], 3))
        for key, value in row.items():
            if key.startswith("eval/") and key.endswith("/success"):
                evaluations.setdefault(key.split("/")[1], []).append(round(value, 3))
    return {**{name: {"before": values[0], "after": values[-1]} for name, values in evaluations.items()}, "steps": steps}


def train(folder: Path, out: Path, seed: int, threads: int, *, name: str, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """Train one seed, unless `out` has its finished run; return its success before and after."""
    run = out / name
    seconds = None
    if not (run / "finished").is_file():
        shutil.rmtree(run, ignore_errors=True)
        began = time.perf_counter()
        settings = (f"out={out}", f"name={name}", f"seed={seed}", f"num_threads={threads}", *overrides)
        subprocess.run([PROGRAM, "train", "config.yaml", *settings], cwd=folder, check=True, stdout=sys.stderr)
        seconds = round(time.perf_counter() - began)
        (run / "finished").write_text(f"{seconds}\n")
    else:
        seconds = int((run / "finished").read_text())
    return {"seed": seed, "seconds": seconds, **figures(run)}


def measure(example: str, *, seeds: list[int], threads: int, controls: list[str], out: Path) -> dict[str, Any]:
    """Train an example with each seed, and its controls; the result says whether the claim holds."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = prepare(example, Path(scratch))
        runs = [train(folder, out, seed, threads, name=f"{example}-seed-{seed}") for seed in seeds]
        controlled = [
            {
                "control": control,
                **train(folder, out, seed, threads, name=f"{example}-{control}-{seed}", overrides=CONTROLS[control]),
            }
            for control in controls
            for seed in (seeds if example in PRETRAINED else seeds[:1])
        ]
    learnt = all(run["greedy"]["before"] <= 0.6 and run["greedy"]["after"] >= CLAIMS[example] for run in runs)
    lowest = min(run["greedy"]["after"] for run in runs)
    as_claimed = learnt and all(run["greedy"]["after"] <= lowest - 0.2 for run in controlled)
    return {"example": example, "runs": runs, "controls": controlled, "as_claimed": as_claimed}


def plot(examples: list[dict[str, Any]], file: Path) -> None:
    """Draw the success of each step's episodes: seeds in blue, shuffled rewards in grey."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(examples), figsize=(4.6 * len(examples), 3), squeeze=False, sharey=True)
    for axis, each in zip(axes[0], examples, strict=True):
        for kind, colour, label in (("controls", "0.6", "shuffled rewards"), ("runs", "tab:blue", "polyturn")):
            for number, run in enumerate(run for run in each[kind] if run.get("control", "shuffled") == "shuffled"):
                steps = range(1, len(run["steps"]) + 1)
                axis.plot(steps, run["steps"], color=colour, alpha=0.8, label=None if number else label)
        axis.set(title=f"SmolLM2-135M, {each['example']}", xlabel="step", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("success of sampled episodes")
    axes[0][0].legend(loc="upper left", frameon=False)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def main() -> int:
    """Train, print one JSON line, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = ", ".join(PREPARED_BY)
    parser.add_argument("examples", nargs="*", metavar="example", help=f"of {known}; by default search and sandbox")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--controls", nargs="*", choices=CONTROLS, default=["shuffled"], help="none without a name")
    parser.add_argument("--out", type=Path, help="folder that keeps the runs")
    parser.add_argument("--plot", type=Path, help="image of the success of each step")
    args = parser.parse_args()
    for example in args.examples:
        if example not in PREPARED_BY:
            parser.error(f"there is no example {example!r} here; known: {known}")
    with tempfile.TemporaryDirectory() as scratch:
        out = (args.out or Path(scratch)).resolve()
        examples = [
            measure(example, seeds=args.seeds, threads=args.threads, controls=args.controls, out=out)
            for example in args.examples or ["search", "sandbox"]
        ]
    if args.plot is not None:
        plot(examples, args.plot)
    as_claimed = all(each["as_claimed"] for each in examples)
    print(json.dumps({"benchmark": "example_learns", "examples": examples, "as_claimed": as_claimed}))
    return 0 if as_claimed else 1


if __name__ == "__main__":
    sys.exit(main())
