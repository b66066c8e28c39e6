"""The lines of conversations in flight outlive their process, and those that a checkpoint stands for are found again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from polyturn.core.errors import SnapshotError
from polyturn.training.journal_file import JournalFile


def span(version: int | None) -> dict[str, Any]:
    return {"k": "span", "policy_version": version}


class Life:
    """One process with a journal; its lines stand for turns of so many records."""

    def __init__(self, folder: Path, *, step: int, resumes: bool = False, oldest: int = 0) -> None:
        self.journal = JournalFile(folder)
        self.froms: dict[str, int] = {}
        if resumes:
            self.journal.resume(step, oldest=lambda ticket: oldest)
        else:
            self.journal.begin(step)

    def begins(self, episode: str, *, why_not: str | None = None) -> None:
        self.froms[episode] = 1
        self.write(episode, {"begun": "d", "why_not": why_not})

    def turn(self, episode: str, *, version: int = 2) -> None:
        start = self.froms.get(episode, 1)
        self.froms[episode] = start + 1
        self.write(episode, {"from": start, "new": [span(version)], "state": f"behind {start}"})

    def write(self, episode: str, line: dict[str, Any]) -> None:
        asyncio.run(self.journal.write(episode, lambda: line))

    def held(self, episode: str) -> list[str] | str | None:
        """Return the states that are held of an episode, or why there is none."""
        held = self.journal.recall(episode)
        if held is None:
            return None
        return [line["state"] for line in held.lines] if held.why_not is None else held.why_not


def test_turns_are_found_after_a_kill_and_once(tmp_path: Path):
    life = Life(tmp_path, step=2)
    life.begins("g4/0")
    life.turn("g4/0")
    life.turn("g4/0", version=1)
    after = Life(tmp_path, step=2, resumes=True)
    assert after.held("g4/0") == ["behind 1", "behind 2"] and after.held("g4/0") is None and after.held("g4/1") is None


def test_what_later_weights_sampled_is_left_out_and_what_came_before_stays(tmp_path: Path):
    life = Life(tmp_path, step=2)
    life.begins("g4/0")
    life.turn("g4/0", version=2)
    life.turn("g4/0", version=3)
    life.begins("g4/1")
    life.turn("g4/1", version=3)
    after = Life(tmp_path, step=2, resumes=True)
    assert after.held("g4/0") == ["behind 1"]
    assert after.held("g4/1") == "weights that came after the checkpoint sampled it"


def test_what_too_old_weights_sampled_is_left_out(tmp_path: Path):
    life = Life(tmp_path, step=2)
    life.begins("g4/0")
    life.turn("g4/0", version=1)
    life.turn("g4/0", version=2)
    assert Life(tmp_path, step=2, resumes=True, oldest=2).held("g4/0") == (
        "the weights that sampled it are too old to train on"
    )


def test_a_run_that_goes_on_behind_an_earlier_turn_replaces_the_later_ones(tmp_path: Path):
    life = Life(tmp_path, step=2)
    life.begins("g4/0")
    life.turn("g4/0", version=2)
    life.turn("g4/0", version=3)
    second = Life(tmp_path, step=2, resumes=True)
    second.froms["g4/0"] = 2
    second.write("g4/0", {"from": 2, "new": [span(2)], "state": "behind the other 2"})
    assert Life(tmp_path, step=2, resumes=True).held("g4/0") == ["behind 1", "behind the other 2"]


def test_an_episode_that_restarts_forgets_what_it_had(tmp_path: Path):
    life = Life(tmp_path, step=2)
    life.begins("g4/0")
    life.turn("g4/0")
    life.begins("g4/0")
    assert Life(tmp_path, step=2, resumes=True).held("g4/0") == []


def test_one_that_was_given_up_says_why(tmp_path: Path):
    life = Life(tmp_path, step=2)
    life.begins("g4/0")
    life.turn("g4/0")
    life.write("g4/0", {"why_not": "it broke"})
    assert Life(tmp_path, step=2, resumes=True).held("g4/0") == "it broke"


def test_half_a_line_is_skipped_and_what_follows_it_is_read(tmp_path: Path):
    Life(tmp_path, step=2).begins("g1/0")
    with (tmp_path / "step-000002.jsonl").open("a") as file:
        file.write('{"s": "g1/1", "begun": "ab')
    between = Life(tmp_path, step=2, resumes=True)
    between.begins("g1/2")
    again = Life(tmp_path, step=2, resumes=True)
    assert (again.held("g1/0"), again.held("g1/1"), again.held("g1/2")) == ([], None, [])


def test_the_journal_of_a_new_checkpoint_has_the_live_groups_alone(tmp_path: Path):
    life = Life(tmp_path, step=2)
    for episode in ("g1/0", "g2r1/0", "g3/0"):
        life.begins(episode)
        life.turn(episode)
    life.journal.forget([1])
    life.journal.begin(4)
    life.turn("g3/0", version=4)
    life.journal.forget([3], are_cut=True)
    life.turn("g3/0", version=4)
    life.journal.begin(6)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-000004.jsonl", "step-000006.jsonl"], "those of the latest two checkpoints"
    assert Life(tmp_path, step=4, resumes=True).held("g3/0") == ["behind 1", "behind 2"]
    after = Life(tmp_path, step=6, resumes=True)
    assert after.held("g1/0") is None and after.held("g3/0") is None
    assert after.held("g2r1/0") == ["behind 1"], "also of a group that stands in for another"
    after.journal.begin(8)
    assert Life(tmp_path, step=8, resumes=True).held("g2r1/0") == ["behind 1"], "and of a run that was resumed"


def test_without_a_checkpoint_the_journal_keeps_what_a_resumed_run_may_use_and_no_more(tmp_path: Path):
    """Steps 3 to 40 behind the checkpoint of step 2: what weights behind it sampled is of no use, and does not pile up."""
    life, path, largest = Life(tmp_path, step=2), tmp_path / "step-000002.jsonl", 0
    for step in range(3, 41):
        episode = f"g{step}/0"
        life.begins(episode)
        life.write(episode, {"from": 1, "new": [span(step - 1)], "state": f"of {step}", "more": "x" * 200_000})
        life.journal.forget([step], oldest=step - 1)
        largest = max(largest, path.stat().st_size)
    assert largest < 2_000_000, f"of {38 * 200_000} bytes that were written"
    life.begins("g41/0")
    life.turn("g41/0", version=2)
    after = Life(tmp_path, step=2, resumes=True)
    assert after.held("g3/0") == ["of 3"], "trained by a step that is taken again, sampled by the checkpoint's weights"
    assert after.held("g39/0") is None and after.held("g41/0") == ["behind 1"]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_after_the_last_checkpoint_only_conversations_in_flight_stay(tmp_path: Path):
    folder = tmp_path / "journal"
    life = Life(folder, step=2)
    for episode in ("g1/0", "g2/0"):
        life.begins(episode)
        life.turn(episode)
    life.journal.forget([1])
    life.journal.begin(4)
    life.journal.settle()
    assert [p.name for p in folder.iterdir()] == ["step-000004.jsonl"]
    assert Life(folder, step=4, resumes=True).held("g2/0") == ["behind 1"]
    life.journal.forget([2])
    life.journal.begin(6)
    life.journal.settle()
    assert not folder.exists()
    life.turn("g2/0")  # a late line of a conversation that was cut off is none's
    assert not folder.exists()


def test_evaluations_are_not_kept(tmp_path: Path):
    journal = JournalFile(tmp_path)
    assert not journal.takes("eval-greedy-0/0") and journal.takes("g12r3/greedy")


def test_what_json_cannot_write_is_refused(tmp_path: Path):
    with pytest.raises(SnapshotError, match="cannot be written as JSON"):
        Life(tmp_path, step=0).write("g1/0", {"begun": object()})


def test_a_disk_that_takes_no_more_ends_the_journal_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    life = Life(tmp_path, step=0)
    (tmp_path / "step-000000.jsonl").unlink()
    (tmp_path / "step-000000.jsonl").symlink_to("/dev/full")
    life.journal._open(tmp_path / "step-000000.jsonl")
    life.begins("g1/0")
    life.begins("g1/1")
    assert caplog.text.count("conversations in flight are not kept any more") == 1


def test_what_became_of_them_is_said_once_however_many_steps_they_start_in(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    life = Life(tmp_path, step=2)
    for episode in ("g4/0", "g4/1", "g5/0"):
        life.begins(episode)
        life.turn(episode, version=1)
    after = Life(tmp_path, step=2, resumes=True)
    resumed = []
    with caplog.at_level("INFO"):
        for episodes in (("g4/0", "g4/1"), ("g5/0",), ()):
            for episode in episodes:
                assert after.held(episode) == ["behind 1"]
                after.journal.count("resumed")
            resumed.append(after.journal.read_metrics()["rollout/resumed_episodes"])
    assert resumed == [2, 1, 0]
    (said,) = [r.getMessage() for r in caplog.records if "in flight" in r.getMessage()]
    assert said == "conversations in flight: 3 went on from their last complete turn, 0 start from their tasks"


def test_a_disk_that_takes_no_journal_ends_it_until_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    life = Life(tmp_path, step=2)
    life.begins("g4/0")
    monkeypatch.setattr(Path, "replace", full)
    life.journal.begin(3)
    assert "not kept any more ([Errno 28] No space left on device)" in caplog.text
    life.turn("g4/0", version=3)
    monkeypatch.undo()
    life.journal.begin(4)
    life.begins("g4/1")
    life.turn("g4/1", version=4)
    after = Life(tmp_path, step=4, resumes=True)
    assert after.held("g4/1") == ["behind 1"] and after.held("g4/0") is None
