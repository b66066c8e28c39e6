"""`.ci/pipeline.py`: what makes a run of CI red, what it remembers, and what it removes."""

from __future__ import annotations

import datetime
import importlib.util
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
    wrong = ci.Outcome(stage=stage, passed=9000, **({"problem": "left out"} if problem else {"failed": ["a.py::b"]}))
    outcomes = [wrong] if stage == "tests" else [ci.Outcome(stage="tests", passed=9000), wrong]
    assert ci.report(ci.Run(), outcomes, []) is not is_red
    assert (f"NOT FINISHED {stage}: left out" if problem else f"FAILED {stage}: a.py::b") in capsys.readouterr().out
