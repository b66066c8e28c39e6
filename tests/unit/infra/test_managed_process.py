"""A child process leaves nothing behind, outlives the thread that started it, ends with its parent, and its log is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from polyturn.infra.process import ManagedProcess, session_of
from support.refusals import refuses
from support.tools_parts import is_alive

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


# --- A child that ignores SIGTERM ends with its parent, if it was started to be killed


CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
PARENT = f"""
import signal, subprocess, sys
from polyturn.infra.process import dies_with_parent
command = dies_with_parent([sys.executable, "-c", {CHILD!r}], number=signal.SIGKILL)
child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
print(child.stdout.readline().strip(), child.pid, flush=True)
sys.stdin.read()
"""
WITHIN_S = 120


def test_child_that_ignores_sigterm_dies_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    ready, pid = parent.stdout.readline().split()
    assert ready == "ready"
    try:
        parent.kill()
        parent.wait()
        until = time.monotonic() + WITHIN_S
        while is_alive(int(pid)) and time.monotonic() < until:
            time.sleep(0.05)
        assert not is_alive(int(pid))
    finally:
        if is_alive(int(pid)):
            os.kill(int(pid), signal.SIGKILL)
