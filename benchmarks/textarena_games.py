"""Checks that examples/textarena learn from their rewards, by training them from scratch. Prints one JSON line.

    python benchmarks/textarena_games.py [--games guess nim nim-past] [--seeds 0] [--threads 2] [--no-control] [--out DIR]

guess: the share of games in which the number is found in three guesses, on held-out seeds. nim: the share of games won from
both seats against an opponent with random legal moves; training itself is self-play. nim-past: the same, trained against a
copy of the policy that is refreshed every five steps, for twice as many steps, because the policy has only one of two seats.
All are measured before reinforcement learning (an imitation of beginners) and after it, sampled at temperature 1 and decoded
greedily. The control repeats the first seed with each group's rewards in a random order. The claim is that, sampled at
temperature 1, the policy gains at least 15 points and ends at least 15 points above the control; otherwise the exit code
is 1.
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
PAST = ("policies={past: {model: self, refresh_every: 5}}", "env.seats=[policy, past]", "train.steps=80")
GAMES: dict[str, tuple[str, tuple[str, ...]]] = {"guess": ("guess", ()), "nim": ("nim", ()), "nim-past": ("nim", PAST)}
"""Game -> its example and the overrides."""
SET = "temperature 1"
GAIN = 0.15
SHUFFLED = "algorithm.advantage=../quickstart/controls.py:shuffled_grpo"


def train(game: str, seed: int, out: Path, threads: int, *, name: str, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """Train one seed and return its success before and after, by evaluation set."""
    began = time.perf_counter()
    example, changes = GAMES[game]
    settings = (f"out={out}", f"name={name}", f"seed={seed}", f"num_threads={threads}", *changes, *overrides)
    program = str(Path(sys.executable).with_name("polyturn"))
    command = [program, "train", f"examples/textarena/{example}.yaml", *settings]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    series: dict[str, list[float]] = {}
    for line in (out / name / "metrics.jsonl").read_text().splitlines():
        for key, value in json.loads(line).items():
            if key.startswith("eval/") and key.endswith("/success"):
                series.setdefault(key.split("/")[1], []).append(value)
    ends = {which: {"before": round(values[0], 3), "after": round(values[-1], 3)} for which, values in series.items()}
    return {"seed": seed, "seconds": round(time.perf_counter() - began), **ends}


def measure(game: str, *, seeds: list[int], threads: int, has_control: bool, out: Path) -> dict[str, Any]:
    """Train a game with each seed, and its control; the result says whether the claim holds."""
    runs = [train(game, seed, out, threads, name=f"{game}-{seed}") for seed in seeds]
    controls = [train(game, seeds[0], out, threads, name=f"{game}-control", overrides=(SHUFFLED,))] if has_control else []
    learnt = all(run[SET]["after"] - run[SET]["before"] >= GAIN for run in runs)
    lowest = min(run[SET]["after"] for run in runs)
    as_claimed = learnt and all(control[SET]["after"] <= lowest - GAIN for control in controls)
    return {"game": game, "runs": runs, "controls": controls, "as_claimed": as_claimed}


def main() -> int:
    """Train, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--games", nargs="+", choices=GAMES, default=["guess", "nim"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-control", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out, has_control = args.out or Path(scratch), not args.no_control
        games = [
            measure(game, seeds=args.seeds, threads=args.threads, has_control=has_control, out=out) for game in args.games
        ]
    as_claimed = all(each["as_claimed"] for each in games)
    print(json.dumps({"benchmark": "textarena_games", "games": games, "as_claimed": as_claimed}))
    return 0 if as_claimed else 1


if __name__ == "__main__":
    sys.exit(main())
