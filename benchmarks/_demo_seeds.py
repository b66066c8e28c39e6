"""The quick start for ten seeds under several roundings, and two controls: more supervised training, shuffled rewards.

    python benchmarks/_demo_seeds.py --out runs/demo --docs benchmarks/README.md

The same seed trains differently if floating-point sums are rounded differently: rounding sometimes decides which token is
sampled, and the runs differ from then on. A recipe that works on one processor only would be luck, so each seed runs as in
`make demo-tiny`, on one thread, with ATen's kernels without vector instructions, from weights changed by a millionth, and,
on a processor with AVX-512, with the kernels for AVX2.

Every run writes a JSON file to OUT and is not repeated while the file exists. So an interrupted call can be continued,
several calls with different --seeds or --roundings can share OUT, and all of OUT is reported. It takes hours; `make bench`
runs it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from run_all import commit, cpu_model

from polyturn.cli.train import ROWS

CONFIG = "examples/quickstart/config.yaml"
AS_SHIPPED = "two threads"
"""The rounding of `make demo-tiny`; the controls and the sampled evaluations use it."""
ROUNDINGS: dict[str, tuple[dict[str, str], list[str]]] = {
    AS_SHIPPED: ({}, ["num_threads=2"]),
    "one thread": ({}, ["num_threads=1"]),
    "default ATen kernels": ({"ATEN_CPU_CAPABILITY": "default"}, ["num_threads=1"]),
    "perturbed weights": ({}, ["num_threads=1", "model.init.initializer_range=0.045000045"]),
}
"""Name -> environment variables and overrides; `perturbed weights` increases every initial weight by a millionth."""
if torch.backends.cpu.get_cpu_capability() == "AVX512":
    ROUNDINGS["AVX2"] = ({"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}, ["num_threads=1"])
MAX_BEFORE, MIN_AFTER, MAX_FIRST_TURN = 0.35, 0.90, 0.20
"""Target of every run: greedy success before (at most) and after (at least), and first-turn success (below)."""


def polyturn(*arguments: str, environment: dict[str, str] | None = None) -> float:
    """Run a command of the library without showing its output; return its CPU seconds."""
    command = [sys.executable, "-c", "from polyturn.cli.main import main; main()", *arguments]
    # Threads that wait without spinning compute the same, and leave the processor to other work.
    variables = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"} | (environment or {})
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=variables)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime


def slug(seed: int | str, name: str) -> str:
    """Return the name of the files and folders of a seed's run."""
    return f"seed-{seed}-{name.replace(' ', '-')}"


def kept(path: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the results in `path`; measure and write them if the file is missing."""
    if not path.is_file():
        measured = {**measure(), "commit": commit()}
        path.write_text(json.dumps(measured, indent=2) + "\n")
    result: dict[str, Any] = json.loads(path.read_text())
    return result


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
    steps_s = [line["time/step_s"] for line in lines if "time/step_s" in line]
    out["grpo_s"] = statistics.median(steps_s) * len(steps_s)  # a pause in the middle of a run is not training time
    return out


def common(out: Path, seed: int, rounding: str) -> list[str]:
    """Return the overrides of every run of a seed under a rounding."""
    return [f"seed={seed}", f"warm_start.kwargs.seed={seed}", f"out={out}", *ROUNDINGS[rounding][1]]


def train(out: Path, seed: int, rounding: str) -> dict[str, Any]:
    """Train one seed under one rounding."""
    name = slug(seed, rounding)
    more = [f"name={name}", "train.keep_checkpoints=1000"]
    if rounding != AS_SHIPPED:
        more += ["evaluation.sets={greedy: {sampling: {temperature: 0}}}", "evaluation.every=0"]
    began = time.monotonic()
    cpu_s = polyturn("train", CONFIG, *common(out, seed, rounding), *more, environment=ROUNDINGS[rounding][0])
    wall_s = time.monotonic() - began
    return {"seed": seed, "rounding": rounding, "run": name, "wall_s": wall_s, "cpu_s": cpu_s, **reports(out / name)}


def more_supervised(out: Path, trained: dict[str, Any]) -> dict[str, Any]:
    """Train on further demonstrations, from the start of `trained`, for as long as its GRPO steps took."""
    seed = trained["seed"]
    start = out / trained["run"] / "checkpoints" / "step-000000"
    options = [*common(out, seed, AS_SHIPPED), f"name=more-sft-{seed}"]
    more = [f"warm_start.max_seconds={trained['grpo_s']:.0f}", "warm_start.steps=100000"]
    more += ["warm_start.optim.lr=1e-3", "warm_start.optim.schedule=constant"]
    more += ["warm_start.kwargs.num_conversations=40000", f"warm_start.kwargs.seed={seed + 100}"]
    polyturn("sft", CONFIG, "--checkpoint", str(start), *options, *more)
    polyturn("eval", CONFIG, "--checkpoint", str(out / f"more-sft-{seed}-sft" / "model"), *options)
    report = (out / f"more-sft-{seed}-eval" / "report.json").read_text()
    return {"seed": seed, "after": json.loads(report, parse_constant=lambda _: None)}


def shuffled_rewards(out: Path, trained: dict[str, Any]) -> dict[str, Any]:
    """Train with the rewards of each group in a random order, from the start of `trained`."""
    seed = trained["seed"]
    start = out / trained["run"] / "checkpoints" / "step-000000" / "model"
    model = [f"model.path={start.resolve()}", "model.init=null", "model.tokenizer=null", "warm_start.steps=0"]
    shuffled = ["algorithm.advantage=controls.py:shuffled_grpo", f"name=shuffled-{seed}"]
    polyturn("train", CONFIG, *common(out, seed, AS_SHIPPED), *model, *shuffled)
    return {"seed": seed, "after": reports(out / f"shuffled-{seed}")["after"]}


CONTROLS = {"more supervised training": more_supervised, "shuffled rewards": shuffled_rewards}


def broken_promises(runs: Sequence[dict[str, Any]], controls: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return a sentence for every run that misses the target."""
    broken = []
    for r in runs:
        before, after = r["before"]["greedy"], r["after"]["greedy"]
        first = max(before["first_turn_success"], after["first_turn_success"])
        if before["success"] > MAX_BEFORE or after["success"] < MIN_AFTER or first >= MAX_FIRST_TURN:
            reached = f"{before['success']:.3f} -> {after['success']:.3f}, first turn {first:.3f}"
            broken.append(f"seed {r['seed']}, {r['rounding']}: {reached}")
    for name, results in controls.items():
        for r in results:
            success = r["after"]["greedy"]["success"]
            if success > MAX_BEFORE:
                broken.append(f"control {name}, seed {r['seed']}: {success:.3f}")
    return broken


BEGIN, END = "<!-- results: written by benchmarks/_demo_seeds.py -->", "<!-- end of results -->"


def write_docs(path: Path, runs: Sequence[dict[str, Any]], controls: dict[str, list[dict[str, Any]]]) -> None:
    """Write the tables of benchmarks/README.md from the results."""
    by = {(r["rounding"], r["seed"]): r for r in runs}
    seeds = sorted({r["seed"] for r in runs})
    roundings = [name for name in ROUNDINGS if any(r["rounding"] == name for r in runs)]
    capability = torch.backends.cpu.get_cpu_capability()
    lines = [
        f"Measured on {datetime.date.today().isoformat()} on {os.cpu_count()} cores of {cpu_model()} ({capability}), "
        f"{len(runs)} runs of commit {', '.join(sorted({r['commit'][:7] for r in runs}))}."
        + ("" if capability == "AVX512" else " AVX512 was not measured: this processor lacks it."),
        "",
    ]
    before = [r["before"]["greedy"]["success"] for r in runs]
    after = [r["after"]["greedy"]["success"] for r in runs]
    lines += [
        f"Greedy success before training: {percent(min(before))} to {percent(max(before))}. "
        f"After: mean {percent(statistics.mean(after))}, weakest run {percent(min(after))}:",
        "",
    ]
    lines += ["| seed | " + " | ".join(roundings) + " |", "|---|" + "---|" * len(roundings)]
    for seed in seeds:
        cells = [percent(by[n, seed]["after"]["greedy"]["success"]) if (n, seed) in by else "-" for n in roundings]
        lines.append(f"| {seed} | " + " | ".join(cells) + " |")
    if len(by) < len(seeds) * len(roundings):
        lines += ["", "A dash stands for a run that was not made."]
    broken = broken_promises(runs, controls)
    lines += ["", f"Missed: {'; '.join(broken)}." if broken else "No run misses the target."]
    whole = [r for r in runs if r["rounding"] == AS_SHIPPED]
    if whole:
        sets = list(whole[0]["after"])
        lines += [
            "",
            f"As `make demo-tiny` runs it, before → after (mean over {len(whole)} of the seeds):",
            "",
        ]
        lines += ["| | " + " | ".join(sets) + " |", "|---|" + "---|" * len(sets)]
        for key, label in ROWS.items():
            cells = [f"{mean(key, whole, 'before', name)} → {mean(key, whole, 'after', name)}" for name in sets]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    if any(controls.values()):
        of = sorted({r["seed"] for results in controls.values() for r in results})
        lines += ["", "Greedy success of the controls, after:", ""]
        lines += ["| | " + " | ".join(f"seed {seed}" for seed in of) + " |", "|---|" + "---|" * len(of)]
        for name, results in controls.items():
            success = {r["seed"]: r["after"]["greedy"]["success"] for r in results}
            lines.append(f"| {name} | " + " | ".join(percent(success[s]) if s in success else "-" for s in of) + " |")
    seconds = [r["cpu_s"] for r in runs]
    lines += [
        "",
        f"One run took {min(seconds):.0f} to {max(seconds):.0f} seconds of CPU time, user and system together (median "
        f"{statistics.median(seconds):.0f}).",
        "Other work shared the machine and slowed it, so wall times say nothing; the CPU time is an upper estimate of the",
        "minutes on one free core, and two take less.",
    ]
    text = path.read_text()
    head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    path.write_text("\n".join([head, "", *lines, "", tail]))


def percent(value: float) -> str:
    """Return a share as text for a table."""
    return f"{100 * value:.1f} %"


def mean(key: str, runs: Sequence[dict[str, Any]], when: str, name: str) -> str:
    """Return the mean of a metric over the runs that have it, as text for a table."""
    values = [r[when][name][key] for r in runs if r[when][name][key] is not None]
    if not values:
        return "-"
    return f"{statistics.mean(values):.2f}" if key == "mean_turns" else percent(statistics.mean(values))


def main() -> None:
    """Run the seeds of the command line and report all results."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("runs/demo"))
    options.add_argument("--seeds", type=int, nargs="*", default=list(range(10)))
    options.add_argument("--roundings", nargs="+", choices=list(ROUNDINGS), default=list(ROUNDINGS))
    options.add_argument("--controls", type=int, nargs="*", default=[0, 1, 2], help="seeds that have controls")
    options.add_argument("--docs", type=Path, help="rewrite the tables of this page, and store the results")
    chosen = options.parse_args()
    out: Path = chosen.out
    out.mkdir(parents=True, exist_ok=True)

    def run(seed: int, rounding: str) -> dict[str, Any]:
        return kept(out / f"run-{slug(seed, rounding)}.json", lambda: train(out, seed, rounding))

    for seed in chosen.seeds:
        for rounding in chosen.roundings:
            run(seed, rounding)
    for seed in chosen.controls:
        for name, control in CONTROLS.items():
            trained = run(seed, AS_SHIPPED)
            kept(out / f"control-{slug(seed, name)}.json", partial(control, out, trained))

    runs = [json.loads(path.read_text()) for path in sorted(out.glob("run-*.json"))]
    controls = {
        n: [json.loads(path.read_text()) for path in sorted(out.glob(f"control-{slug('*', n)}.json"))] for n in CONTROLS
    }
    broken = broken_promises(runs, controls)
    if chosen.docs is not None:
        write_docs(chosen.docs, runs, controls)
        date = datetime.date.today().isoformat()
        machine = {"cpu": cpu_model(), "capability": torch.backends.cpu.get_cpu_capability()}
        stored = {"date": date, **machine, "runs": runs, "controls": controls, "broken_promises": broken}
        (Path(__file__).parent / "results" / f"{date}-demo.json").write_text(json.dumps(stored, indent=2) + "\n")
    weakest = min((r["after"]["greedy"]["success"] for r in runs), default=None)
    line = {"benchmark": "demo_seeds", "runs": len(runs), "weakest": weakest, "passed": not broken, "broken": broken}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
