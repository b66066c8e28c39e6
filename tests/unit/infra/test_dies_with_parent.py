"""A child that ignores SIGTERM ends with its parent, if it was started to be killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_child_that_ignores_sigterm_dies_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    ready, pid = parent.stdout.readline().split()
    assert ready == "ready"
    try:
        parent.kill()
        parent.wait()
        until = time.monotonic() + WITHIN_S
        while is_running(int(pid)) and time.monotonic() < until:
            time.sleep(0.05)
        assert not is_running(int(pid))
    finally:
        if is_running(int(pid)):
            os.kill(int(pid), signal.SIGKILL)
