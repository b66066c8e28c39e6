"""The shipped tools and enumerations answer the same calls as verl 0.7.1's own, or differ as the document says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "benchmarks" / "verl_sides.py"
RECORDED = ROOT / "tests" / "data" / "verl" / "facts_of_0.7.1.json"
"""What verl's own classes did, written by the program."""
LIMIT_S = 600
pytestmark = pytest.mark.timeout(LIMIT_S + 60)

DIFFERENT: dict[str, dict[str, set[str]]] = {
    "a tool that fails": {
        **{f'sandbox {case} {{"code": "x"}}': {"text"} for case in ("400", "page", "nobody", "sandbox fails")},
        'sandbox 500 {"code": "x"}': {"text", "tries"},
        **{f'search {case} {{"query_list": ["x"]}}': {"text"} for case in ("400", "500", "nobody", "page")},
        **{f'search {case} {{"query_list": ["x"]}}': {"text", "metrics"} for case in ("flat", "other form", "null")},
        'search no result {"query_list": ["x"]}': {"text", "metrics"},
        'search late {"query_list": ["x"]}': {"text", "metrics", "tries"},
    },
    "a search without results": {'search no passages {"query_list": ["x"]}': {"text", "metrics"}},
    "queries that are not strings": {'search one {"query_list": [1, 2]}': {"asked"}},
    "sandbox": {f'sandbox {c} {{"code": "x"}}': {"text"} for c in ("nothing", "slow", "compile error", "compile slow")},
    "`timeout` written by the model": {'sandbox prints {"code": "x", "timeout": 99}': {"asked"}},
    "`calc_reward` of search and sandbox": {"search calc_reward": {""}, "sandbox calc_reward": {""}},
    "an unknown instance, a missing URL": {"search released twice": {""}, "search without a URL": {""}},
}
"""Row of the document -> call -> in what it differs, "" where its result is one value."""


def facts_of(side: str, folder: Path, *, python: str = sys.executable, path: str = "") -> dict[str, Any]:
    """Run the program."""
    out = folder / f"{side}.json"
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", **({"PYTHONPATH": path} if path else {})}
    command = [python, str(PROGRAM), side, str(out)]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def difference(theirs: Any, ours: Any) -> set[str]:
    """Return the differences between two results; metrics may have more keys than verl's."""
    if not isinstance(theirs, dict):
        return set() if theirs == ours else {""}
    if "metrics" in theirs:
        ours = {**ours, "metrics": {k: v for k, v in ours["metrics"].items() if k in theirs["metrics"]}}
    return {key for key in {*theirs, *ours} if theirs.get(key) != ours.get(key)}


def test_same_calls_differ_only_as_documented(tmp_path: Path):
    theirs, ours = json.loads(RECORDED.read_text(encoding="utf-8")), facts_of("polyturn", tmp_path)
    assert set(theirs) == set(ours) and len(theirs) >= 57
    found = {call: keys for call in theirs if (keys := difference(theirs[call], ours[call]))}
    assert found == {call: keys for calls in DIFFERENT.values() for call, keys in calls.items()}


def test_document_has_a_row_for_each_difference():
    page = (ROOT / "docs" / "migrate" / "verl-code.md").read_text(encoding="utf-8")
    assert [row for row in DIFFERENT if f"\n| {row} |" not in page] == []


def test_record_is_what_verl_does(tmp_path: Path):
    """With the packages in the folder POLYTURN_VERL_WHEELS, in an environment in which verl works: POLYTURN_VERL_PYTHON."""
    wheels, python = os.environ.get("POLYTURN_VERL_WHEELS"), os.environ.get("POLYTURN_VERL_PYTHON")
    if wheels is None or python is None:
        pytest.skip("POLYTURN_VERL_WHEELS and POLYTURN_VERL_PYTHON do not say where verl is")
    with zipfile.ZipFile(next(Path(wheels).glob("verl-0.7.1-*.whl"))) as archive:
        archive.extractall(tmp_path / "verl")
    path = os.pathsep.join([str(tmp_path / "verl"), str(ROOT / "src")])
    assert facts_of("verl", tmp_path, python=python, path=path) == json.loads(RECORDED.read_text(encoding="utf-8"))
