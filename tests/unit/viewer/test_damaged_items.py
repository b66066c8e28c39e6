"""Damaged trajectories, metrics and files of a run: each affects only itself, and a sentence replaces it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from polyturn.serving.auth import ServerRules
from polyturn.store.stored_run import StoredRun
from polyturn.viewer.app import create_app
from polyturn.viewer.report import write_report
from polyturn.viewer.run_view import RunView
from support.cases import each
from support.damaged_runs import FILES, SHOWN, UNREADABLE, change_row, join_parts
from support.viewer_runs import write_run

WAYS = (
    "metrics", "curves?name=reward/mean&name=eval/greedy/success&axis=time", "overview", "distributions?split=train",
    "highlights", "config", "trajectories", "trajectories?text=2", "groups", "timeline", "timeline?step=1", "export",
)  # fmt: skip
REPORTED = ("flipped", "one id", "extremes", "config's keys", "alarms", "lock", "many names")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged") / "good"
    write_run(folder)
    join_parts(folder)
    return folder


@pytest.fixture
def run(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "run")


def asked(run: Path) -> dict[str, Any]:
    """Ask for every page of a run; return the answers, None for each that was refused with a sentence."""
    client = TestClient(create_app([RunView(run)], rules=ServerRules()), base_url="http://127.0.0.1")
    answers = {way: client.get(f"/api/runs/0/{way}") for way in WAYS}
    rows = answers["trajectories"].json().get("rows", []) if answers["trajectories"].status_code == 200 else []
    for row in rows[:1] + rows[-1:]:
        params = {name: row[name] for name in ("id", "step", "split") if row[name] is not None}
        for page in ("trajectory", "advantage"):
            answers[f"{page} {row['id']}"] = client.get(f"/api/runs/0/{page}", params=params)
    answers["runs"] = client.get("/api/runs")
    assert {way: a.status_code for way, a in answers.items() if a.status_code not in (200, 422)} == {}
    said = [a.json()["detail"] for a in answers.values() if a.status_code == 422]
    assert [detail for detail in said if not isinstance(detail, str) or not detail] == []
    texts = ("export",)
    return {way: None if a.status_code == 422 else a.text if way in texts else a.json() for way, a in answers.items()}


@pytest.mark.parametrize("name", each(4, UNREADABLE))
def test_unreadable_trajectory_costs_itself_alone(run: Path, name: str, caplog: pytest.LogCaptureFixture):
    damaged = change_row(run, UNREADABLE[name])
    view = RunView(run)
    assert len(list(view.export({}).records())) == 17
    assert any("part-00000.parquet, row 0 was skipped: " in problem for problem in view.problems())
    answers = asked(run)
    assert answers["trajectories"]["total"] == 18 and len(answers["export"].splitlines()) == 17
    assert answers[f"trajectory {damaged}"] is None
    assert sum(way.startswith("trajectory") and answer is not None for way, answer in answers.items()) == 1


class FoundMeanwhile(str):
    """The name or reason of a problem; while a thread reads it, another thread adds a problem."""

    problems: dict[str, str]

    def __format__(self, spec: str) -> str:
        self.problems[f"part-{len(self.problems):05d}.parquet"] = "damaged"
        return str(self)

    def partition(self, separator: str) -> tuple[str, str, str]:
        return f"{self}", "", ""


def test_problems_may_be_found_while_others_are_listed(run: Path, monkeypatch: pytest.MonkeyPatch):
    stores: list[StoredRun] = []

    class Store(StoredRun):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            stores.append(self)

    monkeypatch.setattr("polyturn.viewer.run_view.StoredRun", Store)
    view = RunView(run)
    FoundMeanwhile.problems = stores[0].problems
    stores[0].problems[FoundMeanwhile("part-00000.parquet")] = FoundMeanwhile("damaged")
    assert len(view.problems()) == 1 and len(view.problems()) == 3
    change_row(run, UNREADABLE[next(iter(UNREADABLE))])  # a changed part is read again
    view.refresh()
    assert "part-00000.parquet was skipped" in " ".join(view.problems())


@pytest.mark.parametrize("name", each(4, SHOWN))
def test_trajectory_with_odd_values_is_shown(run: Path, name: str):
    change_row(run, SHOWN[name])
    answers = asked(run)
    assert answers["trajectories"]["total"] == 18
    assert max(len(json.dumps(row)) for row in answers["trajectories"]["rows"]) < 25_000


@pytest.mark.parametrize("name", each(4, FILES))
def test_damaged_file_breaks_no_page_and_no_report(run: Path, name: str):
    FILES[name](run)
    answers = asked(run)
    assert answers["runs"][0]["name"] == "run"
    if name in REPORTED:
        report = write_report([run], run.parent / "report.html").read_text()
        assert "<img src=x" not in report
    if "label" in name:
        assert answers["trajectories"]["total"] == 18
    if name == "lock":
        assert answers["runs"][0]["state"] == "died"
