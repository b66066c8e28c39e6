"""Whether a run goes on, is finished or died, told by its lock, its end and its lines."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from polyturn.core.errors import ConfigError, RewardError
from polyturn.infra import folder_lock
from polyturn.infra.folder_lock import hold_folder, look_at
from polyturn.viewer.run_view import RunView


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("train: {steps: 3}\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5, "eval/greedy/success": 0.25}\n')
    return tmp_path


def state(folder: Path) -> tuple[str, str]:
    found = RunView(folder).summary()
    return found["state"], found["end"]


def test_a_run_that_holds_its_folder_is_running_and_one_that_ended_says_how(run: Path):
    with hold_folder(run):
        assert state(run) == ("running", "")
        os.utime(run / "metrics.jsonl", (1000, 1000))
        assert state(run)[0] == "silent"
    assert state(run) == ("stopped", ""), "before its last step, by itself"
    with pytest.raises(RewardError), hold_folder(run):
        raise RewardError("the reward\nraised <b>")
    assert state(run) == ("died", "RewardError: the reward raised <b>")
    with pytest.raises(KeyboardInterrupt), hold_folder(run):
        raise KeyboardInterrupt
    assert state(run) == ("stopped", "")
    (run / "metrics.jsonl").write_text('{"step": 3}\n')
    assert state(run) == ("finished", "")
    (run / "config.yaml").write_text("train: {steps: 100, epochs: 2}\n")
    with hold_folder(run):
        pass
    assert state(run) == ("finished", ""), "its steps are counted by its tasks"


def test_a_run_whose_process_was_killed_died_if_that_was_on_this_machine(run: Path):
    code = (
        "import os, sys; from pathlib import Path; from polyturn.infra.folder_lock import hold_folder\n"
        "with hold_folder(Path(sys.argv[1])): os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(run)], check=False)
    assert look_at(run) == (False, True, None)
    assert state(run) == ("died", "its process was killed, or ended without saying why")
    (run / ".lock").write_text((run / ".lock").read_text().replace(socket.gethostname(), "node3"))
    assert state(run)[0] == "running", "whether it is gone cannot be asked here"


def test_a_warm_start_by_itself_is_finished_at_its_own_last_step(run: Path):
    (run / "metrics.jsonl").unlink()
    (run / "config.yaml").write_text("train: {steps: 3}\nwarm_start: {steps: 2}\n")
    (run / "sft_metrics.jsonl").write_text('{"step": 1, "loss/sft": 2}\n{"step": 2, "loss/sft": 1}\n')
    with hold_folder(run):
        pass
    assert state(run) == ("finished", "")


def test_to_look_at_a_run_keeps_nobody_from_training_and_another_trainer_is_named(run: Path):
    import fcntl

    (run / ".lock").touch()
    with (run / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with pytest.raises(ConfigError, match="another process trains into"), hold_folder(run):
            pass
    with hold_folder(run), pytest.raises(ConfigError, match=f"process {os.getpid()} on .* trains into"), hold_folder(run):
        pass


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "noise", "empty"])
def test_a_lock_that_is_none_tells_nothing(run: Path, kind: str):
    place = run / folder_lock.NAME
    if kind == "link":
        place.symlink_to("/etc/passwd")
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.write_bytes(b"\xff\x00 on \n" * 9999 if kind == "noise" else b"")
    assert state(run) == ("running", "")


def test_a_run_that_goes_on_lacks_nothing_yet_and_one_that_ended_does(tmp_path: Path):
    with hold_folder(tmp_path):
        assert RunView(tmp_path).summary()["problems"] == []
    assert len(RunView(tmp_path).summary()["problems"]) == 2


def test_metrics_that_a_resumed_run_wrote_anew_take_the_place_of_the_old_ones(run: Path):
    """The new file may be longer by the time it is looked at."""
    view = RunView(run)
    assert view.summary()["num_metrics"] == 1
    (run / "new").write_text('{"step": 1, "reward/mean": 0.1}\n{"step": 2, "reward/mean": 0.2, "loss/total": 1.0}\n' * 2)
    (run / "new").replace(run / "metrics.jsonl")
    found = view.summary()
    assert found["num_metrics"] == 4 and found["problems"] == RunView(run).summary()["problems"]
    assert "eval/greedy/success" not in view.metrics()["names"]


def test_the_list_of_runs_has_what_each_was_worth_last(run: Path):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward/mean": 0.75}\n')
    found = RunView(run).summary()
    assert found["latest"] == {"reward/mean": 0.75, "eval/greedy/success": 0.25}
    assert found["last_step"] == 2 and found["planned"] == 3 and found["written_at"] > 0
