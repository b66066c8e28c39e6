"""`run_bounded`: the end of a program ends its children, unless the caller lets them stay."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from polyturn.sandbox.command import StoppedError, Stopper, run_bounded
from support.sandboxes import processes_with, wait_until

pytestmark = pytest.mark.skipif(not hasattr(os, "waitid"), reason="children are killed where waitid exists")


def test_children_end_with_their_program():
    output = run_bounded(["sh", "-c", "sleep 31401 & echo begun"], timeout_s=60)
    assert (output.exit_code, output.stdout, output.is_late) == (0, b"begun\n", False)
    wait_until(lambda: not processes_with("31401"))


def test_output_of_children_is_read_before_they_end(tmp_path: Path):
    script = '(echo child; : > "$1"; exec sleep 31402) & while [ ! -e "$1" ]; do :; done; echo program >&2; exit 3'
    output = run_bounded(["sh", "-c", script, "sh", str(tmp_path / "written")], timeout_s=60)
    assert (output.exit_code, output.stdout, output.stderr) == (3, b"child\n", b"program\n")


def test_kept_children_outlive_a_program_that_ends_by_itself():
    output = run_bounded(["sh", "-c", "sleep 31403 & echo $!"], timeout_s=60, keeps_children=True)
    assert processes_with("31403") == [int(output.stdout)]
    os.kill(int(output.stdout), signal.SIGKILL)


def test_late_program_ends_with_kept_children():
    output = run_bounded(["sh", "-c", "sleep 31404 & sleep 31404"], timeout_s=0.5, keeps_children=True)
    assert output.is_late and output.exit_code == -signal.SIGKILL
    wait_until(lambda: not processes_with("31404"))


def test_stopped_program_ends_with_kept_children():
    stop = Stopper()

    def set_once_it_runs() -> None:
        wait_until(lambda: len(processes_with("31405")) > 2)  # sh and both of its children
        stop.set()

    thread = threading.Thread(target=set_once_it_runs)
    thread.start()
    with pytest.raises(StoppedError):
        run_bounded(["sh", "-c", "sleep 31405 & sleep 31405 & wait"], timeout_s=600, stop=stop, keeps_children=True)
    thread.join()
    wait_until(lambda: not processes_with("31405"))
