"""Kill a run at random moments and let it go on, until it is done; then compare everything that it left.

    killed = kill_until_done(config, settings, kills=5, seed=0)        processes of `polyturn train`, each ended by kill -9
    killed.problems == []                                              no task skipped, none trained on twice

The ledger is the store: each group of training has the number of its ticket, and the order of tasks says which task that is.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polyturn.store.stored_run import open_store
from support.forked import Forked

_RESUMED = re.compile(r"resumed in ([\d.]+) s")
_PATIENCE_S = 120.0
"""How long a process may take until it writes anything."""


@dataclass(slots=True, kw_only=True)
class Killed:
    """What came of a run that was killed again and again."""

    kills: int = 0
    """How often it was killed while it trained."""
    resume_s: list[float] = field(default_factory=list)
    """Seconds that each resume took beside loading the model."""
    resumed_episodes: int = 0
    restarted_episodes: int = 0
    problems: list[str] = field(default_factory=list)


def kill_until_done(
    config: Path, settings: Sequence[str], *, run: Path, steps: int, kills: int, seed: int, max_wait_s: float = 1.0
) -> Killed:
    """Train the run of `config`, kill it `kills` times after at most `max_wait_s` of training each, let it end, check it.

    Args:
        config: Its config file.
        settings: Overrides of the command line.
        run: The run's folder.
        steps: How many steps it takes.
        kills: How often it is killed; fewer where it is done before.
        seed: Of the moments.
        max_wait_s: The longest time between the first sign of life of a process and its end.
    """
    found, rng = Killed(), random.Random(seed)
    while found.kills < kills and not _is_done(run, steps):
        process = _start(config, settings, run)
        is_alive = _wait_for_life(process, run)
        if is_alive:
            time.sleep(rng.uniform(0, max_wait_s))
        process.kill()
        process.wait()
        err = process.err
        if process.returncode not in (0, -9):
            found.problems.append(f"a process ended with {process.returncode}: {err[-2000:]}")
            return found
        if process.returncode == -9 and not is_alive:
            found.problems.append(f"a process did nothing for {_PATIENCE_S:g} s: {err[-2000:]}")
            return found
        found.kills += process.returncode == -9
        _count(err, found)
    last = _start(config, settings, run)
    try:
        last.wait(600)
    except TimeoutError:
        last.kill()
        last.wait()
        found.problems.append("the last process did not come to the end of the run in 600 s")
    _count(last.err, found)
    if last.returncode != 0:
        found.problems.append(f"the last process ended with {last.returncode}: {last.err[-2000:]}")
    found.problems += ledger_problems(run, steps=steps)
    for line in _metrics(run):
        found.resumed_episodes += int(line.get("rollout/resumed_episodes") or 0)
        found.restarted_episodes += int(line.get("rollout/restarted_episodes") or 0)
    return found


def ledger_problems(run: Path, *, steps: int) -> list[str]:
    """Return the problems in the records of a run that visits its tasks in order, one wave of tickets a step."""
    problems = []
    trained = [line["step"] for line in _metrics(run) if "buffer/groups" in line]
    if trained != list(range(1, steps + 1)):
        problems.append(f"metrics.jsonl has the steps {trained}")
    rows = [row for row in open_store(run).table().to_pylist() if row["split"] == "train"]
    twice = [id for id, count in Counter(row["id"] for row in rows).items() if count > 1]
    if twice:
        problems.append(f"trained on twice: {twice}")
    per_step = Counter(row["step"] for row in rows)
    if len(set(per_step.values())) > 1 or set(per_step) != set(range(1, steps + 1)):
        problems.append(f"trajectories of each step: {dict(per_step)}")
    tickets = sorted({int(str(row["group"]).removeprefix("g")) for row in rows})
    if tickets != list(range(len(tickets))):
        missing = sorted(set(range(max(tickets, default=0))) - set(tickets))
        problems.append(f"tickets that were skipped: {missing}")
    return problems


def _start(config: Path, settings: Sequence[str], run: Path) -> Forked:
    resume = ["--resume"] if any((run / "checkpoints").glob("*step-*")) else []
    if not resume:
        shutil.rmtree(run, ignore_errors=True)  # killed before its first checkpoint: nothing to go on from
    return Forked("train", config, *settings, *resume)


def _wait_for_life(process: Forked, run: Path) -> bool:
    """Wait until the process writes into the journal of its conversations or into its metrics; return whether it does."""
    before, deadline = _latest_write(run), time.monotonic() + _PATIENCE_S
    while process.poll() is None and time.monotonic() < deadline:
        if _latest_write(run) != before:
            return True
        time.sleep(0.005)
    return False


def _latest_write(run: Path) -> float:
    times = [0.0]
    for path in (*run.glob("journal/*.jsonl"), run / "metrics.jsonl", run / "checkpoints"):
        try:
            times.append(path.stat().st_mtime)
        except FileNotFoundError:
            continue
    return max(times)


def _is_done(run: Path, steps: int) -> bool:
    return (run / "checkpoints" / f"step-{steps:06d}").is_dir()


def _count(err: str, found: Killed) -> None:
    found.resume_s += [float(seconds) for seconds in _RESUMED.findall(err)]


def _metrics(run: Path) -> list[dict[str, float]]:
    lines = []
    for text in (run / "metrics.jsonl").read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:  # half a line, where the kill fell
            continue
    return lines
