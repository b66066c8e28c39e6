"""A child process leaves nothing behind, outlives the thread that started it, and its log is kept."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import pytest

from polyturn.infra.process import ManagedProcess, session_of
from support.refusals import refuses

FAMILY = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("both are there", flush=True)
time.sleep(600)
"""


def test_process_ends_with_its_children_and_twice(tmp_path: Path) -> None:
    log = tmp_path / "family.log"
    process = ManagedProcess([sys.executable, "-c", FAMILY], log=log)
    while "both" not in process.tail():
        assert process.is_alive
    assert len(process.members()) == 2
    process.end(grace_s=0)
    assert not session_of(process.pid)
    assert process.returncode == -signal.SIGKILL
    process.end()
    assert log.read_text() == "both are there\n"


def test_process_outlives_its_starting_thread() -> None:
    started: list[ManagedProcess] = []
    code = "import sys; print('ready', flush=True); print(sys.stdin.readline().strip(), flush=True)"
    thread = threading.Thread(target=lambda: started.append(ManagedProcess([sys.executable, "-c", code], pipes=True)))
    thread.start()
    thread.join()
    (process,) = started
    assert process.stdin is not None
    assert process.stdout.readline() == b"ready\n"
    process.stdin.write(b"still here\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"still here\n"
    assert process.wait(60)
    process.end()


def test_missing_program_is_an_error_at_once(tmp_path: Path) -> None:
    refuses(lambda: ManagedProcess(["no-such-program"]), FileNotFoundError, "no-such-program")
    (tmp_path / "text").write_text("no program")
    with pytest.raises(PermissionError):
        ManagedProcess([str(tmp_path / "text")])
