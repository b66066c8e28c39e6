"""`Standstill`: a plug-in that never gives its thread back ends the process; one that goes on does not.

Each program runs in a process of its own, because its end is what is tested.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.clock

PROGRAM = """
import asyncio, gc, logging, threading, time
from polyturn.cli.end_process import end_process
from polyturn.core import standstill
from polyturn.core.run_loop import run_loop
from polyturn.infra.threads import DaemonThreads

standstill.GRACE_S, standstill.LAST_HELD_S = 0.0, {held_s}
gc.disable()  # so that a cycle is collected at a known place

class Stands:
    def __init__(self, seconds=3600):
        self.me, self.seconds = self, seconds

    def __del__(self):
        time.sleep(self.seconds)

def drop():
    it = Stands()
    it.me = None

async def work():
{work}
    return "done"

def program():
    print(run_loop(work(), deadline_s={held_s}))
    {then}

logging.basicConfig(format="%(message)s")
end_process(program)
"""
OF_WORKER = """
async def of_worker():
    standstill.Standstill(asyncio.get_running_loop(), deadline_s=0.4, of_worker=True)
    await asyncio.sleep(2)
    time.sleep(3600)
await asyncio.to_thread(asyncio.run, of_worker())
"""


def ended(folder: Path, work: str, *, then: str = "pass", held_s: float = 0.4) -> subprocess.CompletedProcess[str]:
    """Run a program whose coroutine does `work`."""
    file = folder / "program.py"
    file.write_text(PROGRAM.format(work=textwrap.indent(textwrap.dedent(work), "    "), then=then, held_s=held_s))
    return subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    ("work", "then", "name"),
    [
        ("await asyncio.sleep(0.6)\nwhile True:\n    pass", "pass", "the event loop: work"),
        ("logging.root.handlers[0].acquire()\ntime.sleep(3600)", "pass", "the event loop: work"),
        ("await DaemonThreads(name='t').run(drop)", "pass", "a thread: Stands.__del__"),
        ("pass", "drop()", "a thread: Stands.__del__"),
        (OF_WORKER, "pass", "the event loop: work.<locals>.of_worker"),
    ],
    ids=["loop", "console lock", "finalizer in a thread", "finalizer after the loop", "worker"],
)
def test_code_that_never_returns_ends_the_process_with_its_name(tmp_path: Path, work: str, then: str, name: str) -> None:
    done = ended(tmp_path, work, then=then)
    assert done.returncode == 2, done.stderr
    assert name in done.stderr
    assert "program.py:" in done.stderr


def test_cycle_is_collected_beside_the_end_of_the_run(tmp_path: Path) -> None:
    done = ended(tmp_path, "Stands()", then="gc.collect()", held_s=60)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "Stands.__del__" in done.stderr


@pytest.mark.parametrize(
    "work",
    [
        "for _ in range(8):\n    time.sleep(0.2)\n    await asyncio.sleep(0)",
        "for _ in range(4):\n    Stands(0.2)\n    gc.collect()\n    await asyncio.sleep(0.5)",
        "await asyncio.to_thread(time.sleep, 4)",
    ],
)
def test_code_that_goes_on_does_not_end_the_process(tmp_path: Path, work: str) -> None:
    done = ended(tmp_path, work, held_s=2.4)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
