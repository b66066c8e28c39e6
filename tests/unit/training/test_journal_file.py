"""The journal of episodes in flight survives a kill, and a resumed run finds its lines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from polyturn.core.errors import SnapshotError
from polyturn.training.journal_file import JournalFile
from support.refusals import refuses


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
        self.write(episode, {"line": start, "versions": [version], "state": f"behind {start}"})

    def write(self, episode: str, line: dict[str, Any]) -> None:
        asyncio.run(self.journal.write(episode, lambda: line))

    def held(self, episode: str) -> list[str] | str | None:
        """Return the states that are kept of an episode, or why there is none."""
        held = self.journal.recall(episode)
        if held is None:
            return None
        return [line["state"] for line in held.lines] if held.why_not is None else held.why_not


def test_turns_are_found_once_after_a_kill(tmp_path: Path):
    life = Life(tmp_path, step=2)
    life.begins("g4/0")
    life.turn("g4/0")
    life.turn("g4/0", version=1)
    after = Life(tmp_path, step=2, resumes=True)
    assert after.held("g4/0") == ["behind 1", "behind 2"] and after.held("g4/0") is None and after.held("g4/1") is None


def test_turns_of_later_weights_are_left_out(tmp_path: Path):
    life = Life(tmp_path, step=2)
    life.begins("g4/0")
    life.turn("g4/0", version=2)
    life.turn("g4/0", version=3)
    life.begins("g4/1")
    life.turn("g4/1", version=3)
    after = Life(tmp_path, step=2, resumes=True)
    assert after.held("g4/0") == ["behind 1"]
    assert after.held("g4/1") == "it was sampled by weights after the checkpoint"


def test_turns_of_too_old_weights_are_left_out(tmp_path: Path):
    life = Life(tmp_path, step=2)
    life.begins("g4/0")
    life.turn("g4/0", version=1)
    life.turn("g4/0", version=2)
    assert Life(tmp_path, step=2, resumes=True, oldest=2).held("g4/0") == (
        "the weights that sampled it are too old to train on"
    )


def test_resumed_episode_replaces_later_turns(tmp_path: Path):
    life = Life(tmp_path, step=2)
    life.begins("g4/0")
    life.turn("g4/0", version=2)
    life.turn("g4/0", version=3)
    second = Life(tmp_path, step=2, resumes=True)
    second.froms["g4/0"] = 2
    second.write("g4/0", {"line": 2, "versions": [2], "state": "behind the other 2"})
    assert Life(tmp_path, step=2, resumes=True).held("g4/0") == ["behind 1", "behind the other 2"]


def test_restarted_episode_forgets_its_turns(tmp_path: Path):
    life = Life(tmp_path, step=2)
    life.begins("g4/0")
    life.turn("g4/0")
    life.begins("g4/0")
    assert Life(tmp_path, step=2, resumes=True).held("g4/0") == []


def test_dropped_episode_says_why(tmp_path: Path):
    life = Life(tmp_path, step=2)
    life.begins("g4/0")
    life.turn("g4/0")
    life.write("g4/0", {"why_not": "it broke"})
    assert Life(tmp_path, step=2, resumes=True).held("g4/0") == "it broke"


def test_half_a_line_is_skipped(tmp_path: Path):
    Life(tmp_path, step=2).begins("g1/0")
    with (tmp_path / "step-000002.jsonl").open("a") as file:
        file.write('{"s": "g1/1", "begun": "ab')
    between = Life(tmp_path, step=2, resumes=True)
    between.begins("g1/2")
    again = Life(tmp_path, step=2, resumes=True)
    assert (again.held("g1/0"), again.held("g1/1"), again.held("g1/2")) == ([], None, [])


def test_new_journal_has_the_live_groups_alone(tmp_path: Path):
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


def test_journal_without_checkpoints_does_not_pile_up(tmp_path: Path):
    """Steps 3 to 40 behind the checkpoint of step 2: turns of later weights are useless, and do not pile up."""
    life, path, largest = Life(tmp_path, step=2), tmp_path / "step-000002.jsonl", 0
    for step in range(3, 41):
        episode = f"g{step}/0"
        life.begins(episode)
        life.write(episode, {"line": 1, "versions": [step - 1], "state": f"of {step}", "more": "x" * 200_000})
        life.journal.forget([step], oldest=step - 1)
        largest = max(largest, path.stat().st_size)
    assert largest < 2_000_000, f"of {38 * 200_000} bytes that were written"
    life.begins("g41/0")
    life.turn("g41/0", version=2)
    after = Life(tmp_path, step=2, resumes=True)
    assert after.held("g3/0") == ["of 3"], "trained by a step that is taken again, sampled by the checkpoint's weights"
    assert after.held("g39/0") is None and after.held("g41/0") == ["behind 1"]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_settled_journal_keeps_episodes_in_flight_alone(tmp_path: Path):
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
    life.turn("g2/0")  # a late line of a conversation that was cut off is dropped
    assert not folder.exists()


def test_evaluations_are_not_kept(tmp_path: Path):
    journal = JournalFile(tmp_path)
    assert not journal.takes("eval-greedy-0/0") and journal.takes("g12r3/greedy")


def test_line_that_json_cannot_write_is_refused(tmp_path: Path):
    refuses(lambda: Life(tmp_path, step=0).write("g1/0", {"begun": object()}), SnapshotError, "cannot be written as JSON")


def test_full_disk_ends_the_journal_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Until the next checkpoint, whose journal is a new file."""

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    life = Life(tmp_path, step=2)
    life.begins("g4/0")
    monkeypatch.setattr(Path, "replace", full)
    life.journal.begin(3)
    life.turn("g4/0", version=3)
    monkeypatch.undo()
    assert caplog.text.count("No space left on device") == 1
    life.journal.begin(4)
    life.begins("g4/1")
    life.turn("g4/1", version=4)
    after = Life(tmp_path, step=4, resumes=True)
    assert after.held("g4/1") == ["behind 1"]
    assert after.held("g4/0") is None


def test_fate_of_episodes_in_flight_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
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
    assert "3 continued" in said
