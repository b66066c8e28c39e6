"""Runs every benchmark that needs no arguments, and stores the numbers in benchmarks/results/DATE.json.

A benchmark is a script in this folder whose last line on stdout is one JSON object; its other output is for the reader. The
results are stored with the date, the commit and the machine.

    python benchmarks/run_all.py                  all of them
    python benchmarks/run_all.py layout           benchmarks/layout.py alone

If a benchmark fails, {"error": ...} is stored, the others still run, and the exit code is 1. A second run on the same day
updates that day's file: new results replace the earlier ones of the same benchmark.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
NOT_RUN = {"run_all", "flaky", "algorithms_compared", "compat_census", "verl_releases", "verl_sides", "verl_tests"}
"""Scripts that are left out: `flaky` runs the tests for hours, and the others need arguments."""


def scripts() -> dict[str, Path]:
    """Return name -> path of the benchmarks that `make bench` runs."""
    return {p.stem: p for p in sorted(HERE.glob("[!_]*.py")) if p.stem not in NOT_RUN}


def main(names: list[str]) -> int:
    """Run the benchmarks `names`, or all, and return the exit code."""
    known = scripts()
    unknown = [n for n in names if n not in known]
    if unknown:
        print(f"there is no benchmark {unknown[0]!r}; known: {', '.join(known)}", file=sys.stderr)
        return 2
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    path = HERE / "results" / f"{today}.json"
    results = json.loads(path.read_text())["results"] if path.exists() else {}
    machine = {"cpu": cpu_model(), "cores": os.cpu_count(), "python": platform.python_version()}
    failed = 0
    for name in names or known:
        print(f"{name} …", flush=True)
        result = run(known[name])
        failed += "error" in result
        results[name] = {**result, "commit": commit(), **machine}
        print(f"  {json.dumps(result)}", flush=True)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"date": today, "results": results}, indent=2, sort_keys=True) + "\n")
    print(f"{len(names or known) - failed} benchmarks ran, {failed} failed; stored in {path.relative_to(ROOT)}")
    return 1 if failed else 0


def run(script: Path) -> dict[str, Any]:
    """Run one script and return its JSON object with "wall_s" added, or {"error": ...}."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, str(script)], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    wall_s = round(time.perf_counter() - start, 2)
    if done.returncode:
        return {"error": f"exit code {done.returncode}", "wall_s": wall_s}
    lines = done.stdout.strip().splitlines()
    try:
        data = json.loads(lines[-1]) if lines else None
    except json.JSONDecodeError:
        data = None
    if not isinstance(data, dict):
        return {"error": "the last line on stdout is not a JSON object", "wall_s": wall_s}
    return {**data, "wall_s": wall_s}


def commit() -> str:
    """Return the commit that is checked out, with "+" if tracked files were changed."""
    head = _git("rev-parse", "--short=12", "HEAD")
    return head + ("+" if _git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks/*.py") else "")


def cpu_model() -> str:
    """Return the processor's name from the kernel on Linux, from Python elsewhere."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
