"""The quick start for three seeds, and two controls: further supervised training for the same time, shuffled rewards.

    python benchmarks/_demo_seeds.py --out runs/demo --seeds 0 1 2      prints one JSON line, writes OUT/summary.json

Minutes long, so it is not one of the benchmarks that `make bench` runs; `make verify` does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CONFIG = "examples/quickstart/config.yaml"


def polyturn(*arguments: str) -> None:
    """Run a command of the library, its output kept out of ours."""
    command = [sys.executable, "-c", "from polyturn.cli.main import main; main()", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def reports(run: Path) -> dict[str, Any]:
    """Return the evaluation sets before and after training."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    out: dict[str, Any] = {"before": {}, "after": {}}
    last = max(line["step"] for line in lines)
    for line in lines:
        for key, value in line.items():
            if key.startswith("eval/"):
                _, name, metric = key.split("/")
                if line["step"] == 0:
                    out["before"].setdefault(name, {})[metric] = value
                if line["step"] == last:
                    out["after"].setdefault(name, {})[metric] = value
    steps = [line for line in lines if "time/step_s" in line]
    out["grpo_s"] = sum(line["time/step_s"] for line in steps)
    out["other_share"] = sorted(line["time/other_share"] for line in steps)[len(steps) // 2]
    return out


def one_seed(out: Path, seed: int, *, with_controls: bool) -> dict[str, Any]:
    """Train one seed, and its controls from the same warm start."""
    common = [f"seed={seed}", f"warm_start.kwargs.seed={seed}", f"out={out}", "train.keep_checkpoints=1000"]
    began = time.monotonic()
    polyturn("train", CONFIG, f"name=seed-{seed}", *common)
    run = out / f"seed-{seed}"
    found = {"seed": seed, "wall_s": time.monotonic() - began, **reports(run)}
    if with_controls:
        warm = run / "checkpoints" / "step-000000"
        more = [f"warm_start.max_seconds={found['grpo_s']:.0f}", "warm_start.steps=100000", f"name=sft-{seed}"]
        more += ["warm_start.optim.lr=1e-3", "warm_start.optim.schedule=constant"]
        more += ["warm_start.kwargs.num_conversations=40000", f"warm_start.kwargs.seed={seed + 100}"]
        polyturn("sft", CONFIG, "--checkpoint", str(warm), *common, *more)
        polyturn("eval", CONFIG, "--checkpoint", str(out / f"sft-{seed}-sft" / "model"), *common, f"name=sft-{seed}")
        found["more_sft"] = json.loads((out / f"sft-{seed}-eval" / "report.json").read_text())
        model = [
            f"model.path={warm.resolve() / 'model'}",
            "model.init=null",
            "model.train_tokenizer=null",
            "warm_start.steps=0",
        ]
        shuffled = "algorithm.advantage=controls.py:shuffled_grpo"
        polyturn("train", CONFIG, f"name=shuffled-{seed}", *common, *model, shuffled)
        found["shuffled"] = reports(out / f"shuffled-{seed}")["after"]
    return found


def main() -> None:
    """Run what the command line asks for."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=Path("runs/demo"))
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--no-controls", action="store_true")
    chosen = options.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    found = [one_seed(chosen.out, seed, with_controls=not chosen.no_controls) for seed in chosen.seeds]
    (chosen.out / "summary.json").write_text(json.dumps(found, indent=2) + "\n")
    success = {f["seed"]: [f["before"]["greedy"]["success"], f["after"]["greedy"]["success"]] for f in found}
    passed = all(before <= 0.35 and after >= 0.80 for before, after in success.values())
    print(json.dumps({"benchmark": "demo_seeds", "greedy_success": success, "passed": passed}))


if __name__ == "__main__":
    main()
