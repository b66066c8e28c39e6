"""`polyturn rescore` and `polyturn show FOLDER` on a recorded run, and their messages if there is nothing to show."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from polyturn.api.folders import new_run_folder
from polyturn.cli import list_runs, rescore
from polyturn.config.load import load_config, write_resolved
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError, DataError, RolloutError
from polyturn.core.reward import Reward
from polyturn.infra import deadline
from polyturn.rewards.options import CallOptions
from polyturn.rewards.router import RewardRouter
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.store.parquet_store import ParquetStore
from polyturn.store.run_folders import find_runs
from polyturn.testing.episodes import scripted_context, task
from support.forked import run_forked
from support.refusals import refuses
from support.runs import write_tiny_run

pytestmark = pytest.mark.timeout(300)
LENGTH = """
def length(data_source, solution_str, ground_truth, extra_info=None):
    if "boom" in solution_str:
        raise ValueError("boom")
    return {"score": len(solution_str), "gt": ground_truth}
"""

ODD = """
class OddMapping(dict):
    def items(self):
        raise SystemExit(3)


"""


def score_again(run: Path, *, reward: str, where: str | None = None, out: Path | None = None) -> None:
    """Call `polyturn rescore`, whose errors are raised."""
    options = {"--reward": reward, "--where": where, "--out": out}
    words = [str(word) for name, value in options.items() if value is not None for word in (name, value)]
    rescore.main.main([str(run), *words], standalone_mode=False)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "one"
    with ParquetStore(folder) as store:
        for index, text in enumerate(("four", "boom!")):
            spec = GroupSpec(id=f"g{index}", task=task("2+2?", ground_truth="4"), size=1)
            (group,) = asyncio.run(RolloutPool(scripted_context([text])).run([spec]))
            store.add(group, step=index, split="train")
    return folder


def test_rescoring_writes_both_rewards_and_errors(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "mine.py").write_text(LENGTH)
    monkeypatch.chdir(tmp_path)
    score_again(run_folder, reward="mine.py:length")
    rows = pq.read_table(run_folder / "rescored" / "mine.py-length.parquet").to_pylist()
    assert [r["new_reward"] for r in rows] == [4.0, None]
    assert rows[0]["info"] == '{"gt": "4"}'
    assert "failed with ValueError: boom" in rows[1]["error"]
    shown = capsys.readouterr()
    assert "not scored" in shown.out + shown.err and "ValueError: boom" in shown.out + shown.err


def test_reward_that_changes_directory_moves_no_file(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine.py").write_text("import os\n\ndef moves(trajectory):\n    os.chdir('/')\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    score_again(Path("runs/one"), reward="mine.py:moves", out=Path("x.parquet"))
    assert pq.read_table(tmp_path / "x.parquet").num_rows == 2


@pytest.mark.parametrize(
    "code", ["return '1.0'", "raise ValueError('half a pair: \\ud800')", "return OddMapping(score=1.0)"]
)
def test_rescoring_fails_with_reasons_where_nothing_is_scored(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
):
    (tmp_path / "mine.py").write_text(ODD + f"def f(trajectory):\n    {code}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RolloutError, match="none of the 2 trajectories could be scored"):
        score_again(run_folder, reward="mine.py:f", out=Path("x.parquet"))
    rows = pq.read_table(tmp_path / "x.parquet").to_pylist()
    assert all(row["error"].startswith("reward 'mine.py:f' of trajectory ") for row in rows)


@pytest.mark.parametrize("component", ["tool/search", "interaction"])
def test_route_with_one_score_is_enough(tmp_path: Path, component: str):
    route = "tools" if component == "tool/search" else component
    with ParquetStore(tmp_path) as store:
        for index, components in enumerate(({"outcome": 0.0}, {"outcome": 0.5, component: 0.5})):
            spec = GroupSpec(id=f"g{index}", task=task("2+2?", ground_truth="4"), size=1)
            (group,) = asyncio.run(RolloutPool(scripted_context(["four"])).run([spec]))
            reward = Reward(total=components["outcome"], components=components)
            one = dataclasses.replace(group.trajectories[0], reward=reward)
            store.add(dataclasses.replace(group, trajectories=(one,)), step=0, split="train")
    score_again(tmp_path, reward=route)
    assert pq.read_table(tmp_path / "rescored" / f"{route}.parquet").num_rows == 2


def test_too_many_hanging_calls_end_rescoring(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine.py").write_text("import time\n\ndef hangs(trajectory):\n    time.sleep(20)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(deadline, "MAX_ABANDONED", 0)
    monkeypatch.setattr(rescore, "RewardRouter", partial(RewardRouter, calls=CallOptions(timeout_s=0.05)))
    monkeypatch.setattr(rescore, "rescore", partial(rescore.rescore, max_concurrent=1))
    with pytest.raises(RolloutError, match=r"1 calls of the reward 'mine.py:hangs' still run past their deadline"):
        score_again(run_folder, reward="mine.py:hangs")


def test_condition_narrows_what_is_rescored(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine.py").write_text(LENGTH)
    monkeypatch.chdir(tmp_path)
    score_again(run_folder, reward="mine.py:length", where="step = 0", out=tmp_path / "x.parquet")
    assert pq.read_table(tmp_path / "x.parquet").num_rows == 1


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"reward": "mine.py:lenght"}, ConfigError, "lenght"),
        ({"where": "step = 9"}, DataError, "step = 9"),
        ({"reward": "tools"}, DataError, "--reward tools: .*2 trajectories"),
        ({"reward": "turns"}, DataError, "--reward turns: .*2 trajectories"),
        ({"out": Path("runs/one")}, ConfigError, "--out"),
        ({"out": Path("runs/one/trajectories/part-000000.parquet")}, ConfigError, "--out"),
        ({"out": Path("x" * 300)}, ConfigError, "File name too long.*--out"),
    ],
)
def test_impossible_rescoring_is_refused_and_writes_nothing(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: Any, error: type[Exception], says: str
):
    (tmp_path / "mine.py").write_text(LENGTH)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=says):
        score_again(run_folder, **{"reward": "mine.py:length", **changed})
    assert not (run_folder / "rescored").exists()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("async def f(trajectory):\n    for task in asyncio.all_tasks():\n        task.cancel()\n", "cancelled every task"),
        ("async def f(trajectory):\n    asyncio.get_running_loop().stop()\n", "stopped the event loop"),
        ("def f(trajectory):\n    sys.stdout.close()\n    return 1.0\n", "closed the standard output"),
    ],
)
def test_reward_that_ends_the_process_is_one_sentence(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
):
    (tmp_path / "mine.py").write_text("import asyncio, sys\n\n" + code)
    monkeypatch.chdir(tmp_path)
    called = run_forked("rescore", run_folder, "--reward", "mine.py:f")
    assert called.returncode == 2 and said in called.err and "Traceback" not in called.err, called.err


def test_runs_are_listed_with_where_they_are(run_folder: Path, capsys: pytest.CaptureFixture[str]):
    (run_folder / "metrics.jsonl").write_text('{"step": 0, "eval/greedy/success": 0.25}\n{"step": 3, "reward/mean": 0.5}\n')
    (run_folder.parent / "empty").mkdir()
    list_runs.run(run_folder.parent)
    shown = capsys.readouterr().out
    assert "one" in shown and "0.250" in shown and "0.500" in shown and "empty" not in shown
    refuses(lambda: list_runs.run(run_folder.parent / "empty"), DataError, "there is no run in")


def test_run_deleted_while_runs_are_listed_is_left_out(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for name in ("another", "third"):
        shutil.copytree(run_folder, run_folder.parent / name)
    listed = Path.iterdir

    def iterdir(folder: Path):
        """List a folder, with a file and a run that are deleted meanwhile."""
        entries = list(listed(folder))
        yield from entries
        yield folder / "gone.tmp"
        if folder.name == "third":
            shutil.rmtree(run_folder.parent / "another")

    monkeypatch.setattr(Path, "iterdir", iterdir)
    os.utime(run_folder.parent / "third", (2e9, 2e9))
    list_runs.run(run_folder.parent)
    shown = capsys.readouterr().out
    assert "one" in shown and "third" in shown and "another" not in shown


def test_runs_of_a_project_are_found(tmp_path: Path):
    config = write_tiny_run(tmp_path)
    refuses(lambda: find_runs([tmp_path]), DataError, "there is no run in")
    folder = new_run_folder(tmp_path / "runs" / "tiny")
    write_resolved(load_config(RunConfig, config).resolved, folder / "config.yaml")
    assert find_runs([tmp_path]) == find_runs([tmp_path / "runs"]) == find_runs([folder]) == [folder]
