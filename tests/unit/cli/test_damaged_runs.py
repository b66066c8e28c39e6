"""Runs that are damaged, half written, empty, of an older version or being written: shown as far as they go, said aloud."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polyturn.cli.main import main
from polyturn.core.errors import DataError
from polyturn.core.serde import to_json
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.store.parquet_store import ParquetStore, list_parts
from polyturn.store.run_folders import find_runs
from polyturn.testing.episodes import scripted_context, task, tiny_codec
from polyturn.viewer.run_view import RunView
from support.runs import call_command

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


def fill_a_part_with_noise(folder: Path) -> None:
    list_parts(folder / "trajectories")[0].write_bytes(b"PAR1" + bytes(range(256)) * 9)


def empty_a_part(folder: Path) -> None:
    list_parts(folder / "trajectories")[0].write_bytes(b"")


def make_a_newer_part(folder: Path) -> None:
    part = list_parts(folder / "trajectories")[0]
    table = pq.read_table(part)
    pq.write_table(table.select(["id"]).replace_schema_metadata({"polyturn.version": "99"}), part)


@pytest.mark.parametrize("damage", [truncate_a_part, fill_a_part_with_noise, empty_a_part, make_a_newer_part])
def test_a_damaged_part_costs_no_other_and_is_named_everywhere(run: Path, damage: Callable[[Path], None], tmp_path: Path):
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
    listed = call("runs", run.parent)
    assert listed.code == 0 and "one" in listed.out and "2" in listed.out
    reported = call("report", run, "-o", tmp_path / "report.html")
    assert reported.code == 0 and (tmp_path / "report.html").stat().st_size > 1000, reported.err


def test_when_no_part_can_be_read_that_is_the_sentence(run: Path):
    for part in list_parts(run / "trajectories"):
        part.write_bytes(b"gone")
    shown = call("show", run)
    assert shown.code == 2 and "not one of its 2 parts of trajectories can be read" in shown.err
    assert call("runs", run.parent).code == 0
    assert RunView(run).page({})["total"] == 0


def test_without_a_config_everything_is_shown(run: Path):
    (run / "config.yaml").unlink()
    assert RunView(run).config() == "" and call("show", run).code == 0 and call("runs", run.parent).code == 0


def test_a_run_without_trajectories_says_what_it_has(run: Path):
    for part in list_parts(run / "trajectories"):
        part.unlink()
    shown = call("show", run)
    assert shown.code == 2 and "has no trajectories" in shown.err and "first step" in shown.err
    (run / "trajectories").rmdir()
    shown = call("show", run)
    assert shown.code == 2 and "holds no recorded trajectories" in shown.err and "metrics.jsonl" in shown.err
    assert any("recorded no trajectories" in p for p in RunView(run).problems())


def test_an_empty_folder_and_none_are_said(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "not-there"):
        assert any(said in call("show", folder).err for said in ("holds no recorded trajectories", "there is no folder"))
        for command in ("runs", "view"):
            called = call(command, folder)
            assert called.code == 2 and str(folder) in called.err
    with pytest.raises(DataError, match="there is no run in"):
        find_runs([tmp_path / "empty"])


def test_the_first_version_of_the_store_is_read(run: Path):
    from polyturn.store.stored_run import open_store

    (one, *_) = open_store(run).trajectories(step=0)
    for part in list_parts(run / "trajectories"):
        part.unlink()
    row = {
        "id": one.id, "group": "g0", "step": 0, "split": "train", "task_id": one.task.id, "data_source": "d",
        "reward": 0.0004, "num_turns": 1, "num_tokens": 9, "num_sampled_tokens": 5, "stop_reason": "stop", "error": None,
        "payload": json.dumps(to_json(one)),
    }  # fmt: skip
    pq.write_table(pa.Table.from_pylist([row]), run / "trajectories" / "part-00000.parquet")
    assert "It is 5." in call("show", run, one.id).out
    assert "0.0004" in call("show", run).out  # small, and not none
    assert RunView(run).page({})["total"] == 1


def test_a_run_that_is_being_written_shows_what_is_whole_and_then_the_rest(run: Path):
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


def test_a_trajectory_as_tokens_says_of_each_span_why_and_obeys_no_escape(run: Path):
    shown = call("show", run, "g1/0", "--tokens")
    assert shown.code == 0, shown.err
    assert "sampled turn 0" in shown.out and "sampled and trained" in shown.out and "the task wrote it" in shown.out
    assert "\x1b" not in shown.out and "[bold]b[/]" in shown.out
    assert "\x1b" not in call("show", run, "g1/0").out
    (run / "tokenizer" / "tokenizer.json").unlink()
    assert "shown as their ids" in call("show", run, "g1/0", "--tokens").out


def test_colours_tell_the_mask_on_a_terminal(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = call("show", run, "g1/0", "--tokens")
    assert "\x1b[30;42m" in shown.out and "\x1b[36m" in shown.out and "\x1b[31mred" not in shown.out


def test_a_condition_narrows_the_list_and_a_wrong_one_is_said(run: Path):
    assert "2 trajectories" in call("show", run, "--where", "step = 1").out
    assert "Columns: " in call("show", run, "--where", "stepp = 1").err
    assert "where step = 9" in call("show", run, "--where", "step = 9").err
    assert "name it" in call("show", run, "--tokens").err
    assert "g1/0" in call("show", run, "--trajectory", "g1/0").out
