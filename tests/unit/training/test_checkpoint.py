"""A checkpoint is complete or absent; the newest and the best stay; a damaged one is refused, and code in one never runs."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from polyturn.core.errors import CheckpointError, RankLostError
from polyturn.training import shard_reader
from polyturn.training.checkpoint import Checkpoints, Saver
from polyturn.training.ranked import RankedBackend
from polyturn.training.shards import read_shards, stored_kinds
from support.refusals import refuses
from support.states import MakesFolder


def export(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(p.name for p in checkpoints.folder.glob("*") if p.is_dir())


def test_saved_state_is_loaded(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    state = {"policy": {"w": torch.arange(3.0)}, "loop": {"step": 4, "best": float("-inf"), "reports": {}}}
    path = checkpoints.save(4, state, export=export)
    loaded = checkpoints.load(path)
    assert loaded["loop"] == state["loop"] and torch.equal(loaded["policy"]["w"], torch.arange(3.0))
    assert (path / "model" / "config.json").is_file()
    assert checkpoints.latest() == path and checkpoints.best() is None


def test_only_the_newest_and_the_best_stay(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(6):
        checkpoints.save(step, {"step": step}, export=export, is_best=step == 1)
    assert names(checkpoints) == ["step-000001", "step-000004", "step-000005"]
    checkpoints.save(6, {}, export=export, is_best=True)
    assert names(checkpoints) == ["step-000005", "step-000006"], "the former best is an ordinary checkpoint again"
    best = checkpoints.best()
    assert best.name == "step-000006"


def test_written_checkpoint_can_become_the_best(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(0, {}, export=export)
    checkpoints.mark_best(0)
    checkpoints.save(1, {}, export=export)
    checkpoints.save(2, {}, export=export)
    assert names(checkpoints) == ["step-000000", "step-000002"]


def test_steps_are_ordered_as_numbers(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (999_999, 1_000_000, 1_000_001):
        checkpoints.save(step, {}, export=export)
    latest = checkpoints.latest()
    assert latest.name == "step-1000001"


def fails(problem: BaseException) -> Any:
    def broken_export(folder: Path) -> None:
        folder.mkdir()
        raise problem

    return broken_export


@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), RuntimeError("file write failed")])
def test_failed_save_leaves_the_earlier_checkpoint(tmp_path: Path, problem: Exception):
    checkpoints = Checkpoints(tmp_path)
    first = checkpoints.save(1, {"step": 1}, export=export)
    refuses(lambda: checkpoints.save(1, {"step": 1}, export=fails(problem)), CheckpointError, "step 1", "step-000001")
    assert checkpoints.load(first) == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"], "no draft is left behind"


def test_lost_rank_is_not_a_full_disk(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    lost = RankLostError("rank 1 was killed")
    with pytest.raises(RankLostError) as caught:  # the run restarts by this error, not by a CheckpointError
        checkpoints.save(1, {"step": 1}, export=fails(lost))
    assert caught.value is lost
    assert not list(tmp_path.iterdir()), "no draft is left behind"


def test_kill_during_a_replacement_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The process dies between setting the former one aside and moving the new one to its place."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"try": 1}, export=export)
    rename = Path.rename

    def die(self: Path, target: Path) -> Path:
        if self.name.startswith(".draft"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", die)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(3, {"try": 2}, export=export)
    monkeypatch.undo()
    again = Checkpoints(tmp_path)
    latest = again.latest()
    assert latest is not None and again.load(latest) == {"try": 1}
    again.save(3, {"try": 3}, export=export)
    assert again.load(latest) == {"try": 3} and [p.name for p in tmp_path.iterdir()] == ["step-000003"]


def test_draft_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Checkpoints(tmp_path).save(3, {}, export=fails(KeyboardInterrupt()))
    Checkpoints(tmp_path).save(4, {}, export=export)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000004"]


def test_missing_checkpoint_is_refused(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() is None
    refuses(lambda: checkpoints.load(tmp_path / "step-000001"), CheckpointError, "step-000001")


@pytest.mark.parametrize("damage", [lambda whole: whole[:100], lambda whole: b"", lambda whole: b"\x80\x02}s."])
def test_damaged_checkpoint_is_refused_in_one_line(tmp_path: Path, damage: Callable[[bytes], bytes]):
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, {"step": 1}, export=export)
    state = path / "state.pt"
    state.write_bytes(damage(state.read_bytes()))
    refuses(lambda: checkpoints.load(path), CheckpointError, "state.pt", "Error", "step-000001")


def test_mark_that_cannot_be_written_is_an_error(tmp_path: Path):
    (tmp_path / ".best").mkdir()
    saver = Saver(Checkpoints(tmp_path))
    saver.save(1, {"step": 1}, export=export, is_best=True)
    refuses(lambda: saver.wait(), CheckpointError, "step 1", "step-000001")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "policy"
    state = {"weight": torch.arange(6.0).reshape(2, 3), "half": torch.ones(2, dtype=torch.bfloat16), "step": 3}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_tensors_and_numbers_come_back(shards: Path) -> None:
    state = {"weight": torch.zeros(2, 3), "half": torch.zeros(2, dtype=torch.bfloat16), "step": 0}
    read_shards(state, shards)
    assert torch.equal(state["weight"], torch.arange(6.0).reshape(2, 3))
    assert state["step"] == 3
    assert stored_kinds(shards)["half"].dtype == torch.bfloat16


class Ranks:
    """Two ranks that have written; one of them to its own machine."""

    num_ranks, row_width = 2, 1

    def call(self, command: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [True for _ in shares]


@pytest.mark.parametrize("name", ["__0_0.distcp", shard_reader.METADATA])
def test_shards_that_the_controller_does_not_see_are_refused(shards: Path, name: str) -> None:
    backend: Any = RankedBackend(Ranks(), "policy")  # type: ignore[arg-type]
    backend.save(shards)
    assert backend.is_saved()
    (shards / name).unlink()
    refuses(backend.is_saved, CheckpointError, name, str(shards), "set `out`")


@pytest.mark.parametrize("read", [stored_kinds, lambda folder: read_shards({"weight": torch.zeros(2, 3)}, folder)])
def test_metadata_with_code_is_refused_and_does_not_run(shards: Path, tmp_path: Path, read: Any) -> None:
    (shards / shard_reader.METADATA).write_bytes(pickle.dumps(MakesFolder(tmp_path / "ran")))
    refuses(lambda: read(shards), CheckpointError, "mkdir")
    assert not (tmp_path / "ran").exists()


def test_value_with_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    dcp.save({"step": MakesFolder(tmp_path / "ran")}, checkpoint_id=folder, no_dist=True)
    with pytest.raises(CheckpointError):
        read_shards({"step": 0}, folder)
    assert not (tmp_path / "ran").exists()


def test_metadata_of_another_type_is_refused(shards: Path) -> None:
    (shards / shard_reader.METADATA).write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    refuses(lambda: stored_kinds(shards), CheckpointError, "dict")
