"""Whether a run is running, finished or dead, judged by its lock, its end and its lines."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PosixPath
from typing import Any

import pytest

from polyturn.core.errors import ConfigError, RewardError
from polyturn.infra import folder_lock
from polyturn.infra.folder_lock import hold_folder, read_lock
from polyturn.viewer import metric_file
from polyturn.viewer.metric_file import MetricFile
from polyturn.viewer.run_view import RunView


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("train: {steps: 3}\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5, "eval/greedy/success": 0.25}\n')
    return tmp_path


def state(folder: Path) -> tuple[str, str]:
    found = RunView(folder).summary()
    return found["state"], found["end"]


def test_state_of_a_run_follows_its_lock(run: Path):
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


def test_killed_run_of_this_machine_died(run: Path):
    code = (
        "import os, sys; from pathlib import Path; from polyturn.infra.folder_lock import hold_folder\n"
        "with hold_folder(Path(sys.argv[1])): os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(run)], check=False)
    assert read_lock(run) == (False, True, None)
    assert state(run) == ("died", "its process was killed, or ended without a reason")
    (run / ".lock").write_text((run / ".lock").read_text().replace(socket.gethostname(), "node3"))
    assert state(run)[0] == "running", "whether it is gone cannot be asked here"


def test_warm_start_alone_finishes_at_its_last_step(run: Path):
    (run / "metrics.jsonl").unlink()
    (run / "config.yaml").write_text("train: {steps: 3}\nwarm_start: {steps: 2}\n")
    (run / "sft_metrics.jsonl").write_text('{"step": 1, "loss/sft": 2}\n{"step": 2, "loss/sft": 1}\n')
    with hold_folder(run):
        pass
    assert state(run) == ("finished", "")


def test_reader_does_not_block_training(run: Path):
    import fcntl

    (run / ".lock").touch()
    with (run / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with pytest.raises(ConfigError, match="another process trains into"), hold_folder(run):
            pass
    with hold_folder(run), pytest.raises(ConfigError, match=f"process {os.getpid()} on .* trains into"), hold_folder(run):
        pass


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "noise"])
def test_damaged_lock_is_ignored(run: Path, kind: str):
    place = run / folder_lock.NAME
    if kind == "link":
        place.symlink_to("/etc/passwd")
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.write_bytes(b"\xff\x00 on \n" * 9999)
    assert state(run) == ("running", "")


def test_only_an_ended_run_lacks_files(tmp_path: Path):
    with hold_folder(tmp_path):
        assert RunView(tmp_path).summary()["problems"] == []
    assert len(RunView(tmp_path).summary()["problems"]) == 2


def test_rewritten_metrics_replace_the_old_ones(run: Path):
    """The new file may be longer by the time it is looked at."""
    view = RunView(run)
    assert view.summary()["num_metrics"] == 1
    (run / "new").write_text('{"step": 1, "reward/mean": 0.1}\n{"step": 2, "reward/mean": 0.2, "loss/total": 1.0}\n' * 2)
    (run / "new").replace(run / "metrics.jsonl")
    found = view.summary()
    assert found["num_metrics"] == 4 and found["problems"] == RunView(run).summary()["problems"]
    assert "eval/greedy/success" not in view.metrics()["names"]


def test_threads_read_each_line_once(run: Path, monkeypatch: pytest.MonkeyPatch):
    both_have_read = threading.Barrier(2)

    class File(io.FileIO):
        def read(self, size: int | None = -1) -> bytes | None:
            data = super().read(size)
            with contextlib.suppress(threading.BrokenBarrierError):
                both_have_read.wait(0.5)  # in vain if one thread waits for the other, as it should
            return data

    class Opened(PosixPath):
        def open(self, *args: Any) -> Any:
            return File(str(self))

    monkeypatch.setattr(metric_file, "contained", lambda folder, name: Opened(folder / name))
    metrics = MetricFile(run, "metrics.jsonl")
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: metrics.refresh(), range(2)))
    assert len(metrics.lines) == 1 and not metrics.problem


def test_summary_has_the_latest_values(run: Path):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward/mean": 0.75}\n')
    found = RunView(run).summary()
    assert found["latest"] == {"reward/mean": 0.75, "eval/greedy/success": 0.25}
    assert found["last_step"] == 2 and found["planned"] == 3 and found["written_at"] > 0
