"""The quick start for three seeds, and two controls: further supervised training for the same time, shuffled rewards.

    python benchmarks/_demo_seeds.py --out runs/demo --seeds 0 1 2      prints one JSON line, stores the numbers in results/

Minutes long, so it is not one of the benchmarks that `make bench` runs; `make verify` does.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from run_all import cpu_model

from polyturn.cli.train import ROWS

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


BEGIN, END = "<!-- results: written by benchmarks/_demo_seeds.py -->", "<!-- end of results -->"


def write_docs(path: Path, found: list[dict[str, Any]]) -> None:
    """Write the tables of docs/demo.md from what was measured."""
    lines = [f"Measured on {datetime.date.today().isoformat()}, two cores of {cpu_model()}.", ""]
    for name in ("greedy", "temperature 1", "one turn"):
        lines += [f"**{name}**, before → after", ""]
        lines += ["| | " + " | ".join(f"seed {f['seed']}" for f in found) + " |", "|---|" + "---|" * len(found)]
        for key, label in ROWS.items():
            cells = [f"{cell(key, f['before'][name][key])} → {cell(key, f['after'][name][key])}" for f in found]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += ["**Success of the controls**, where the seed itself is above", ""]
    lines += ["| | " + " | ".join(f"seed {f['seed']}" for f in found) + " |", "|---|" + "---|" * len(found)]
    for key, label in (("more_sft", "more supervised training"), ("shuffled", "shuffled rewards")):
        for name in ("greedy", "temperature 1"):
            cells = [cell("success", f[key][name]["success"]) if key in f else "-" for f in found]
            lines.append(f"| {label}, {name} | " + " | ".join(cells) + " |")
    lines += ["", "**Time**", ""]
    lines += ["| | " + " | ".join(f"seed {f['seed']}" for f in found) + " |", "|---|" + "---|" * len(found)]
    lines.append("| the whole command | " + " | ".join(f"{f['wall_s']:.0f} s" for f in found) + " |")
    lines.append("| of it the GRPO steps | " + " | ".join(f"{f['grpo_s']:.0f} s" for f in found) + " |")
    share = " | ".join(f"{100 * f['other_share']:.1f} %" for f in found)
    lines.append(f"| of a step outside generation, forward and backward (median) | {share} |")
    text = path.read_text()
    head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    path.write_text("\n".join([head, "", *lines, "", tail]))


def cell(key: str, value: float | None) -> str:
    """Return a number of the report for a table."""
    if value is None or value != value:
        return "-"
    return f"{value:.2f}" if key == "mean_turns" else f"{100 * value:.1f} %"


def main() -> None:
    """Run what the command line asks for."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=Path("runs/demo"))
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--no-controls", action="store_true")
    options.add_argument("--docs", type=Path, help="rewrite the tables of this page")
    chosen = options.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    found = [one_seed(chosen.out, seed, with_controls=not chosen.no_controls) for seed in chosen.seeds]
    results = Path(__file__).parent / "results" / f"{datetime.date.today().isoformat()}-demo.json"
    results.parent.mkdir(exist_ok=True)
    for path in (chosen.out / "summary.json", results):
        path.write_text(json.dumps(found, indent=2) + "\n")
    if chosen.docs is not None:
        write_docs(chosen.docs, found)
    success = {f["seed"]: [f["before"]["greedy"]["success"], f["after"]["greedy"]["success"]] for f in found}
    passed = all(before <= 0.35 and after >= 0.80 for before, after in success.values())
    print(json.dumps({"benchmark": "demo_seeds", "greedy_success": success, "passed": passed}))


if __name__ == "__main__":
    main()
