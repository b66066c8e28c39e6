"""Runs that are damaged, half written, empty or being written: commands show the rest and name the damage."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from polyturn.cli.main import main
from polyturn.core.errors import DataError
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.store.parquet_store import ParquetStore, list_parts
from polyturn.store.run_folders import find_runs
from polyturn.testing.episodes import scripted_context, task, tiny_codec
from polyturn.viewer.run_view import RunView
from support.refusals import refuses
from support.runs import call_command

pytestmark = pytest.mark.timeout(300)
call = functools.partial(call_command, main)
HOSTILE = "a\x1b[31mred [bold]b[/] <b>"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run of two parts with a step of metrics each."""
    folder = tmp_path / "runs" / "one"
    for index, text in enumerate(("It is 5.", HOSTILE)):
        with ParquetStore(folder) as store:
            spec = GroupSpec(id=f"g{index}", task=task("2+2?", id=f"t{index}", ground_truth="4"), size=2)
            (group,) = asyncio.run(RolloutPool(scripted_context([text])).run([spec]))
            store.add(group, step=index, split="train")
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "reward/mean": 0.5}) + "\n" for s in (0, 1)))
    (folder / "config.yaml").write_text("name: one\n")
    tiny_codec().tokenizer.save_pretrained(folder / "tokenizer")
    return folder


def truncate_a_part(folder: Path) -> None:
    part = list_parts(folder / "trajectories")[0]
    part.write_bytes(part.read_bytes()[:200])


def make_a_newer_part(folder: Path) -> None:
    part = list_parts(folder / "trajectories")[0]
    table = pq.read_table(part)
    pq.write_table(table.select(["id"]).replace_schema_metadata({"polyturn.version": "99"}), part)


@pytest.mark.parametrize("damage", [truncate_a_part, make_a_newer_part])
def test_damaged_part_is_named_and_costs_no_other(run: Path, damage: Callable[[Path], None], tmp_path: Path):
    damage(run)
    name = list_parts(run / "trajectories")[0].name
    shown = call("show", run)
    assert shown.code == 0 and "g1/0" in shown.out and "g0/0" not in shown.out, shown.err
    assert f"{name} cannot be read" in shown.out.replace("\n", "")
    view = RunView(run)
    assert view.page({})["total"] == 2 and any(name in p for p in view.problems())
    (tmp_path / "mine.py").write_text("def fn(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    rescored = call("rescore", run, "--reward", f"{tmp_path}/mine.py:fn")
    assert rescored.code == 0, rescored.err
    listed = call("show", run.parent)
    assert listed.code == 0 and "one" in listed.out and "2" in listed.out
    reported = call("report", run, "-o", tmp_path / "report.html")
    assert reported.code == 0 and (tmp_path / "report.html").stat().st_size > 1000, reported.err


def test_run_that_cannot_be_read_is_named_beside_the_others(run: Path):
    shutil.copytree(run, run.parent / "circle")
    (run.parent / "circle" / "trajectories" / "part-000009.parquet").symlink_to("part-000009.parquet")
    listed = call("show", run.parent)
    assert listed.code == 0 and "one" in listed.out, listed.err
    assert "circle is not shown" in listed.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everywhere")
def test_run_without_permission_is_named_beside_the_others(run: Path):
    (locked := run.parent / "locked").mkdir(mode=0)
    listed = call("show", run.parent)
    assert listed.code == 0 and "one" in listed.out, listed.err
    assert "locked is not shown" in listed.err and "Permission denied" in listed.err
    shown = call("show", locked)
    assert shown.code == 2 and "locked" in shown.err


def test_run_without_a_readable_part_is_refused(run: Path):
    for part in list_parts(run / "trajectories"):
        part.write_bytes(b"gone")
    shown = call("show", run)
    assert shown.code == 2 and "none of its 2 parts of trajectories can be read" in shown.err
    assert call("show", run.parent).code == 0
    assert RunView(run).page({})["total"] == 0


def test_run_without_a_config_is_shown(run: Path):
    (run / "config.yaml").unlink()
    assert RunView(run).config() == "" and call("show", run).code == 0 and call("show", run.parent).code == 0


def test_run_without_trajectories_names_what_it_has(run: Path):
    for part in list_parts(run / "trajectories"):
        part.unlink()
    shown = call("show", run)
    assert shown.code == 2 and "has no trajectories" in shown.err and "first step" in shown.err
    (run / "trajectories").rmdir()
    shown = call("show", run)
    assert shown.code == 2 and "has no recorded trajectories" in shown.err and "metrics.jsonl" in shown.err
    assert "first step" in shown.err
    assert any("recorded no trajectories" in p for p in RunView(run).problems())


def test_empty_and_missing_folders_are_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "not-there"):
        assert any(said in call("show", folder).err for said in ("has no recorded trajectories", "there is no folder"))
        for command in ("show", "view"):
            called = call(command, folder)
            assert called.code == 2 and str(folder) in called.err
    refuses(lambda: find_runs([tmp_path / "empty"]), DataError, "there is no run in")


def test_run_being_written_shows_its_whole_lines(run: Path):
    view = RunView(run)
    assert view.page({})["total"] == 4
    (run / "trajectories" / ".part-00002.parquet.tmp").write_bytes(b"PAR1 half")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, ')
    assert view.page({})["total"] == 4 and view.summary()["last_step"] == 1 and view.problems() == []
    with (run / "metrics.jsonl").open("a") as file:
        file.write('"reward/mean": 1}\n')
    assert view.summary()["last_step"] == 2
    assert "4 trajectories" in call("show", run).out


def test_tokens_of_a_trajectory_name_the_origin_of_each_span(run: Path):
    shown = call("show", run, "g1/0", "--tokens")
    assert shown.code == 0, shown.err
    assert "sampled turn 0" in shown.out and "sampled and trained" in shown.out and "it comes from the task" in shown.out
    assert "\x1b" not in shown.out and "[bold]b[/]" in shown.out
    assert "\x1b" not in call("show", run, "g1/0").out
    (run / "tokenizer" / "tokenizer.json").unlink()
    assert "shown as ids" in call("show", run, "g1/0", "--tokens").out


def test_colours_show_the_mask_on_a_terminal(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = call("show", run, "g1/0", "--tokens")
    assert "\x1b[30;42m" in shown.out and "\x1b[36m" in shown.out and "\x1b[31mred" not in shown.out


def test_condition_narrows_the_list(run: Path):
    assert "2 trajectories" in call("show", run, "--where", "step = 1").out
    assert "Columns: " in call("show", run, "--where", "stepp = 1").err
    assert "where step = 9" in call("show", run, "--where", "step = 9").err
    error = call("show", run, "--step", 99, "--split", "train").err
    assert "of the split 'train' of step 99; its steps are from 0 to 1" in error, "the split is right"
    assert "Known: 'train'" in call("show", run, "--step", 99, "--split", "eval/x").err
    assert call("show", run, "--where", "step = 9", "--split", "train").err.endswith("of the split 'train' where step = 9\n")
    assert "has no recorded trajectories" in call("show", run.parent, "--step", 1).err, "the list of runs has no steps"
    assert "give its id" in call("show", run, "--tokens").err
    shutil.copytree(run, run.parent / "other")
    assert len(call("show", run.parent, "-n", "1").out.splitlines()) == len(call("show", run.parent).out.splitlines()) - 1
    assert "g1/0" in call("show", run, "--trajectory", "g1/0").out
