"""The stages of `.ci/run`.

    clean      end processes and remove files that an earlier run of this checkout left
    install    make install, three tries; make system (bubblewrap)
    check      make check                                                     blocking
    tests      pytest, the first tier; failed tests run once more, alone      blocking
    MARK       pytest -m MARK for each mark of the second tier                blocking for `engines` and `kill`
    report     stages, failures, flaky tests, reasons of skips, slowest tests

The environments of the second tier are built in the background, at low priority, while the first tier runs.

A failed test runs once more, alone. If it fails again, it has failed. If it passes, it is reported as FLAKY and added to
flaky.tsv in the user's cache, which clean clones share: three entries of one test within thirty days are a defect.

Every process of a run inherits POLYTURN_CI, so that nothing outlives the run: not even a grandchild in a session of its own.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / ".ci" / "state"
"""Logs and JUnit files of the last run."""
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "polyturn" / "ci"
FLAKY = CACHE / "flaky.tsv"
PASSED = CACHE / "passed"
"""The commits that passed, one per line."""
PYTHON = ROOT / ".venv" / "bin" / "python"
MIN_PASSED = 5000
"""Fewer passed tests of the first tier mean that a folder was not collected."""
MAX_RETRIES = 12
"""More failures than this are no accident, and are not run again."""
TESTS_S = 30 * 60
"""Far above the eight minutes that two free cores take: the limit is there to end a hang, also on a slow machine."""
MARKS_S = 35 * 60
"""For all marks together."""
RUN_S = 70 * 60
"""The marks end at this time after the start of the run."""
RETRIES_S = 10 * 60
"""For all second tries of a stage together; a test that gets none has failed."""
MARK_S = {"engines": 20 * 60}
DEFAULT_MARK_S = 10 * 60
INTERRUPT_S = 60
"""The time that an interrupted command has for its report."""
MARKS = ("engines", "kill", "containers", "cluster", "browser", "clock", "learns", "chance")
BLOCKING = {"engines", "kill"}
BACKGROUND = {"engines": 900, "environments": 600}
"""`make` targets and their limits in seconds. Both build virtual environments under the user's cache."""
NO_NETWORK = 75
INSTALL_PAUSES_S = (10, 30, 0)
"""Pause after each failed try."""


@dataclass(kw_only=True)
class Outcome:
    """One run of pytest.

    ```
    Outcome(stage="kill", passed=41, failed=["tests/e2e/test_ranks.py::test_x"], flaky=[], skipped=Counter({"no Ray": 2}))
    ```
    """

    stage: str
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    flaky: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    warnings: int = 0
    problem: str = ""
    """Why the stage did not finish; empty if it did."""
    slowest: list[tuple[float, str]] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    """The first line of each failure's message."""

    @property
    def is_red(self) -> bool:
        return bool(self.failed or self.problem)


class Run:
    """One run of the pipeline: what happened, and how long each stage took."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.times: list[tuple[str, float]] = []
        self.environment = dict(os.environ, POLYTURN_CI=str(ROOT), PIP_COMPILE="0", PIP_DISABLE_PIP_VERSION_CHECK="1")
        # Bytecode is compiled once and shared; with this variable every process of a test would compile all sources.
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self.skipped_targets: list[str] = []

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        print(f"== {name}", flush=True)
        start = time.monotonic()
        try:
            yield
        finally:
            self.times.append((name, time.monotonic() - start))

    def run(self, command: Sequence[str], *, timeout_s: float) -> int | None:
        """Run a command, with its output shown; its exit status, or None after `timeout_s`."""
        process = subprocess.Popen(command, cwd=ROOT, env=self.environment, start_new_session=True)
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest then writes what it has found so far
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(INTERRUPT_S)
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def start_builds(self) -> dict[str, subprocess.Popen[bytes]]:
        targets = dict(BACKGROUND)
        if os.environ.get("POLYTURN_TEST_ENGINES") == "0":
            del targets["engines"]
            self.skipped_targets.append("the real engines: POLYTURN_TEST_ENGINES=0")
        builds = {}
        for target, limit_s in targets.items():
            with (STATE / f"make-{target}.log").open("wb") as log:
                builds[target] = subprocess.Popen(
                    ["nice", "-n", "19", "timeout", "--kill-after=30", str(limit_s), "make", target],
                    cwd=ROOT,
                    env=self.environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        return builds

    def finish_builds(self, builds: dict[str, subprocess.Popen[bytes]]) -> None:
        for target, process in builds.items():
            if process.wait() != 0:
                lines = (STATE / f"make-{target}.log").read_text(errors="replace").splitlines()
                print(*lines[-15:], sep="\n", flush=True)
                self.skipped_targets.append(f"make {target} failed, see above")

    def pytest(self, stage: str, arguments: Sequence[str], *, timeout_s: float, processes: int) -> Outcome:
        """Run tests, then the failed ones once more, alone."""
        outcome = Outcome(stage=stage)
        status, failed = self._pytest(outcome, [*arguments, "-n", str(processes)], timeout_s=timeout_s)
        if status is None:
            outcome.problem = f"not finished after {timeout_s:.0f} s"
        elif status not in (0, 1, 5):  # 5: no test has the mark
            outcome.problem = f"pytest ended with status {status}"
        if len(failed) > MAX_RETRIES:
            outcome.failed = failed
            return outcome
        end = time.monotonic() + RETRIES_S
        for test in failed:
            alone = Outcome(stage=f"{stage}-again")
            status, _ = self._pytest(alone, [test, "-m", "", "-n", "0"], timeout_s=max(1.0, end - time.monotonic()))
            (outcome.flaky if status == 0 and alone.passed else outcome.failed).append(test)
        outcome.passed += len(outcome.flaky)
        return outcome

    def _pytest(self, outcome: Outcome, arguments: Sequence[str], *, timeout_s: float) -> tuple[int | None, list[str]]:
        junit = STATE / f"{outcome.stage}.xml"
        cache = ROOT / ".pytest_cache" / "v"
        last_failed, warnings = cache / "cache" / "lastfailed", cache / "polyturn" / "warnings"  # of tests/conftest.py
        for file in (junit, last_failed, warnings):
            file.unlink(missing_ok=True)
        command = [str(PYTHON), "-m", "pytest", *arguments, f"--junitxml={junit}", "--tb=short", "-o", "junit_family=xunit1"]
        status = self.run(command, timeout_s=timeout_s)
        if junit.exists():
            _read_junit(junit, outcome)
        if warnings.exists():
            outcome.warnings = json.loads(warnings.read_text())
        return status, list(json.loads(last_failed.read_text())) if last_failed.exists() else []


def _read_junit(file: Path, outcome: Outcome) -> None:
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        name = f"{case.get('file') or case.get('classname')}::{case.get('name')}"
        outcome.slowest.append((float(case.get("time", 0)), name))
        skip = case.find("skipped")
        problems = [p for kind in ("failure", "error") if (p := case.find(kind)) is not None]
        if problems:
            outcome.reasons[name] = (problems[0].get("message") or "").partition("\n")[0][:200]
        elif skip is not None:
            outcome.skipped[re.sub(r"\s+", " ", skip.get("message") or "")] += 1
        else:
            outcome.passed += 1
    outcome.slowest = sorted(outcome.slowest, reverse=True)[:40]


def processes_of_this_checkout() -> list[int]:
    """Pids of the processes that a run of this checkout started, this one and its parents left out."""
    mark = f"POLYTURN_CI={ROOT}".encode()
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                pids.append(int(folder.name))
    return pids


def clean() -> None:
    """End what an earlier run of this checkout left, and remove its files."""
    for _ in range(20):  # a process can start another one while the list is read
        pids = processes_of_this_checkout()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            break
        time.sleep(0.2)
    remove_ray_sessions(Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray"))
    for folder in Path("/dev/shm").glob("polyturn-*"):
        owner = folder / "owner"
        pid = owner.read_text().split()[0] if owner.is_file() and owner.read_text().split() else ""
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)


def remove_ray_sessions(folder: Path) -> None:
    """Remove the folders of Ray's sessions that no living process started or names in its arguments."""
    commands = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            commands.append(file.read_bytes())
    for session in folder.glob("session_*_*"):  # session_DATE_TIME_PID, with the id of the process that started it
        is_used = Path("/proc", session.name.rpartition("_")[2]).exists() or any(
            session.name.encode() in command for command in commands
        )
        if not is_used and not session.is_symlink():
            shutil.rmtree(session, ignore_errors=True)


def number_of_processes() -> int:
    """At most four, and 2.5 GB of memory for each."""
    memory = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    gigabytes = int(memory.group(1)) / 2**20 if memory else 8.0
    return max(1, min(4, (os.cpu_count() or 1) + 1, int(gigabytes / 2.5)))


def install(run: Run) -> bool:
    for pause_s in INSTALL_PAUSES_S:
        if run.run(["make", "install"], timeout_s=600) == 0:
            break
        print(f"make install failed; next try in {pause_s} s", flush=True)
        time.sleep(pause_s)
    else:
        return False
    if run.run(["make", "system"], timeout_s=300) != 0:
        run.skipped_targets.append("make system failed: no bubblewrap")
    return True


def note_flaky(tests: Sequence[str], commit: str) -> list[str]:
    """Append flaky tests to the list; those with three entries in thirty days."""
    today = datetime.date.today()
    rows = [line.split("\t") for line in FLAKY.read_text().splitlines()[1:]] if FLAKY.exists() else []
    new = [[today.isoformat(), commit[:8], test] for test in tests]
    if new:
        header = "date\tcommit\ttest\n" if not FLAKY.exists() else ""
        FLAKY.parent.mkdir(parents=True, exist_ok=True)
        with FLAKY.open("a") as file:
            file.write(header + "".join("\t".join(row) + "\n" for row in new))
    since = (today - datetime.timedelta(days=30)).isoformat()
    counts = Counter(row[2] for row in rows + new if row[0] >= since)
    return [test for test, count in counts.items() if count >= 3]


def report(run: Run, outcomes: Sequence[Outcome], often_flaky: Sequence[str]) -> bool:
    """Print what happened; whether the run passed."""
    first = outcomes[0]
    print("\n== slowest tests of the first tier")
    for seconds, name in first.slowest:
        print(f"{seconds:8.1f} s  {name}")
    print("\n== skipped")
    for reason, count in sum((o.skipped for o in outcomes), Counter[str]()).most_common():
        print(f"{count:5}  {reason}")
    for target in run.skipped_targets:
        print(f"SKIPPED {target}")
    print("\n== stages")
    for name, seconds in run.times:
        print(f"{seconds:8.1f} s  {name}")
    print()
    red = False
    for outcome in outcomes:
        blocking = outcome is first or outcome.stage in BLOCKING
        for test in outcome.failed:
            print(f"FAILED {outcome.stage}: {test}  {_reason(outcome, test)}")
        for test in outcome.flaky:
            print(f"FLAKY {outcome.stage}: {test}  {_reason(outcome, test)}")
        if outcome.problem:
            print(f"NOT FINISHED {outcome.stage}: {outcome.problem}")
        red = red or (blocking and outcome.is_red)
        skipped = sum(outcome.skipped.values())
        note = "" if blocking else " (reported, not blocking)"
        print(f"{outcome.stage}: {outcome.passed} passed, {len(outcome.failed)} failed, {skipped} skipped{note}")
    if first.passed < MIN_PASSED:
        print(f"FAILED tests: {first.passed} passed, at least {MIN_PASSED} are expected: a folder was not collected")
        red = True
    for test in often_flaky:
        print(f"DEFECT: {test} was flaky three times within thirty days")
    passed, failed, warnings = (
        sum(numbers) for numbers in zip(*((o.passed, len(o.failed), o.warnings) for o in outcomes), strict=True)
    )
    seconds = time.monotonic() - run.start
    print(f"{passed} passed, {failed} failed, {warnings} warnings in {seconds:.0f} s: CI {'failed' if red else 'passed'}")
    return not red


def _reason(outcome: Outcome, test: str) -> str:
    name = test.partition("::")[2]
    return next((reason for case, reason in outcome.reasons.items() if case.endswith(name)), "")


def main() -> int:
    clean()
    STATE.mkdir(parents=True, exist_ok=True)
    run = Run()
    builds: dict[str, subprocess.Popen[bytes]] = {}
    try:
        with run.stage("install"):
            if not install(run):
                print("the packages could not be installed; no test ran: 0 passed, 0 failed")
                return NO_NETWORK
        with run.stage("check"):
            if run.run(["make", "check"], timeout_s=600) != 0:
                print("make check failed; no test ran: 0 passed, 1 failed")
                return 1
        builds = run.start_builds()
        run.run([str(PYTHON), "-m", "compileall", "-q", "src", "tests"], timeout_s=120)
        with run.stage("tests"):
            outcomes = [run.pytest("tests", [], timeout_s=TESTS_S, processes=number_of_processes())]
        if outcomes[0].is_red:
            print("the first tier failed; the second is left out")
        else:
            outcomes += second_tier(run, builds)
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        often = note_flaky([test for outcome in outcomes for test in outcome.flaky], commit)
        passed = report(run, outcomes, often)
        if passed:
            PASSED.parent.mkdir(parents=True, exist_ok=True)
            with PASSED.open("a") as file:
                file.write(commit + "\n")
        return 0 if passed else 1
    finally:
        for process in builds.values():
            process.kill()
        sys.stdout.flush()
        clean()


def second_tier(run: Run, builds: dict[str, subprocess.Popen[bytes]]) -> list[Outcome]:
    with run.stage("builds"):
        run.finish_builds(builds)
        if run.run(["make", "browser"], timeout_s=300) != 0:
            run.skipped_targets.append("make browser failed, see above")
    outcomes = []
    end = min(time.monotonic() + MARKS_S, run.start + RUN_S)
    for mark in MARKS:
        limit_s = min(MARK_S.get(mark, DEFAULT_MARK_S), end - time.monotonic())
        if limit_s < 60:
            outcomes.append(Outcome(stage=mark, problem="left out: the stages before took all the time"))
            continue
        with run.stage(mark):
            # The two real engines share no processor time with anything else; other marks run one test at a time.
            processes = 2 if mark == "engines" else 0
            outcomes.append(run.pytest(mark, ["-m", f"{mark} and not slow"], timeout_s=limit_s, processes=processes))
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
