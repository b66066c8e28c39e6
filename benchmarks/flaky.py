"""Measures how often the first tier of the tests fails on unchanged code.

Runs the tests of `make test` repeatedly on the same code; every second run shares the machine with eight busy processes.
Each run has another temporary folder. A failed run is a red; each failed test is listed with the number of runs in which it
failed.

    python benchmarks/flaky.py                  20 runs: about three hours on two cores
    python benchmarks/flaky.py --runs 2         one run alone, one beside the busy processes
    python benchmarks/flaky.py --runs 2 --busy  both beside the busy processes
    python benchmarks/flaky.py tests/unit/infra tests/unit/tools

The last line is JSON: {"runs": 20, "busy_runs": 10, "reds": 0, "names": {}, "median_s": 460.1, "busy_median_s": 1203.5}
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NUM_BUSY = 8
RUN_S = 3600
"""Seconds after which a run is stopped and counted as a red."""


def _spin() -> None:
    while os.getppid() != 1:  # ends with the process that started it
        pass


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep `count` processes busy while the block runs."""
    processes = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def run(paths: list[str], num_processes: int) -> tuple[float, list[str]]:
    """Run the tests once; return the seconds and the ids of the failed tests."""
    folder = Path(tempfile.mkdtemp(prefix="flaky-"))
    cache = folder / "cache"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        str(num_processes),
        f"--basetemp={folder / 'tmp'}",
        "-o",
        f"cache_dir={cache}",
    ]
    start = time.perf_counter()
    try:
        done = subprocess.run([*command, *paths], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=RUN_S, check=False)
        print("\n".join(done.stdout.splitlines()[-8:]), flush=True)
        last_failed = cache / "v" / "cache" / "lastfailed"
        failed = list(json.loads(last_failed.read_text())) if last_failed.exists() else []
        if done.returncode and not failed:
            failed = [f"pytest ended with status {done.returncode}"]
    except subprocess.TimeoutExpired:
        failed = [f"not finished after {RUN_S} s"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return time.perf_counter() - start, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="files or folders of tests; all by default")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--busy", action="store_true", help="run all of them beside the busy processes")
    arguments = parser.parse_args()
    names: Counter[str] = Counter()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    reds = 0
    for number in range(arguments.runs):
        is_busy = arguments.busy or number % 2 == 1
        print(f"run {number + 1} of {arguments.runs}{', beside busy processes' if is_busy else ''}", flush=True)
        with busy(NUM_BUSY if is_busy else 0):
            took_s, failed = run(arguments.paths, arguments.processes)
        seconds[is_busy].append(took_s)
        reds += bool(failed)
        names.update(failed)
    medians = {is_busy: round(statistics.median(took), 1) if took else None for is_busy, took in seconds.items()}
    result = {"runs": arguments.runs, "busy_runs": len(seconds[True]), "reds": reds, "names": dict(names.most_common())}
    print(json.dumps(result | {"median_s": medians[False], "busy_median_s": medians[True]}))


if __name__ == "__main__":
    main()
