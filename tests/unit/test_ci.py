"""`.ci/pipeline.py`: the causes of a red run, its memory, and the leftovers that it removes."""

from __future__ import annotations

import datetime
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ci(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("ci_pipeline", ROOT / ".ci" / "pipeline.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ci_pipeline", module)
    spec.loader.exec_module(module)
    return module


def test_third_flaky_run_in_thirty_days_is_a_defect(ci: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ci.FLAKY.is_relative_to(ROOT), "a clean clone would forget it"
    monkeypatch.setattr(ci, "FLAKY", tmp_path / "ci" / "flaky.tsv")
    assert ci.note_flaky(["a", "b"], "1" * 40) == []
    old = (datetime.date.today() - datetime.timedelta(days=31)).isoformat()
    with ci.FLAKY.open("a") as file:
        file.write(f"{old}\t22222222\tb\n")
    assert ci.note_flaky(["a", "b"], "3" * 40) == []
    assert ci.note_flaky(["a"], "4" * 40) == ["a"]


@pytest.mark.parametrize(("stage", "is_red"), [("tests", True), ("engines", True), ("kill", True), ("clock", False)])
@pytest.mark.parametrize("problem", [True, False], ids=["not finished", "failed"])
def test_blocking_stage_that_fails_or_does_not_finish_is_red(
    ci: ModuleType, stage: str, is_red: bool, problem: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ci.Outcome(stage=stage, passed=9000, warnings=7)
    wrong.problem, wrong.failed = ("left out", []) if problem else ("", ["a.py::b"])
    outcomes = [wrong] if stage == "tests" else [ci.Outcome(stage="tests", passed=9000), wrong]
    assert ci.report(ci.Run(), outcomes, []) is not is_red
    text = capsys.readouterr().out
    assert (f"NOT FINISHED {stage}: left out" if problem else f"FAILED {stage}: a.py::b") in text and "7 warnings" in text


def test_ray_sessions_without_a_process_are_removed(ci: ModuleType, tmp_path: Path) -> None:
    """A session has a process that started it, or one with the session in its arguments, or none."""
    with subprocess.Popen(["sleep", "0"]) as ended:
        ended.wait()
    own, used, left = (f"session_2026-01-01_00-00-00_{n}_{pid}" for n, pid in enumerate((os.getpid(), ended.pid, ended.pid)))
    for name in (own, used, left):
        (tmp_path / name / "logs").mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to(tmp_path / own)
    program = [sys.executable, "-c", "print(flush=True); input()", f"--session-dir={tmp_path / used}"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as raylet:
        assert raylet.stdout is not None and raylet.stdout.readline()
        ci.remove_ray_sessions(tmp_path)
        raylet.communicate(b"\n")
    assert {path.name for path in tmp_path.iterdir()} == {own, used, "session_latest"}
