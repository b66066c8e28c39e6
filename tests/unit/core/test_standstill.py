"""`Standstill`: a plug-in that never gives its thread back ends the process with a sentence, and nobody else does.

Each program is a file in a process of its own: what is tested is that the process ends, and whose file it is that stands.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.cases import each

PROGRAM = """
import asyncio, gc, logging, pdb, threading, time
from polyturn.cli.end_process import end_process
from polyturn.core import standstill
from polyturn.core.run_loop import run_loop
from polyturn.infra.threads import DaemonThreads

standstill.GRACE_S, standstill.LAST_HELD_S = 0.0, {held_s}
gc.disable()  # so that it is known where a cycle is collected

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


def ended(folder: Path, work: str, *, then: str = "pass", held_s: float = 0.4) -> subprocess.CompletedProcess[str]:
    """Return what a program left whose coroutine did `work`."""
    folder.mkdir(exist_ok=True)
    file = folder / "program.py"
    file.write_text(PROGRAM.format(work=textwrap.indent(textwrap.dedent(work), "    "), then=then, held_s=held_s))
    return subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=240)


NEVER = [
    ("time.sleep(3600)", "", "the event loop: work"),
    ("await asyncio.sleep(0.6)\nwhile True:\n    pass", "", "the event loop: work"),
    ("Stands()\ngc.collect()", "", "Stands.__del__"),
    ("drop()", "", "Stands.__del__"),
    ("await DaemonThreads(name='t').run(drop)", "", "a thread: Stands.__del__"),
    ("asyncio.get_running_loop().call_soon(drop)\nawait asyncio.sleep(1)", "", "Stands.__del__"),
    ("pass", "drop()", "a thread: Stands.__del__"),
]
"""Work, what follows the coroutine, and what is named."""


def test_what_never_gives_its_thread_back_ends_the_process_with_its_name(tmp_path: Path):
    with ThreadPoolExecutor(len(NEVER)) as threads:  # each waits
        tried = enumerate(NEVER)
        ran = threads.map(lambda one: ended(tmp_path / str(one[0]), one[1][0], then=one[1][1] or "pass"), tried)
    for (_, then, place), done in zip(NEVER, ran, strict=True):
        assert done.returncode == 2 and done.stdout == ("done\n" if then else ""), done.stderr
        assert place in done.stderr and "program.py:" in done.stderr and "--resume" in done.stderr, done.stderr
        held = float(re.search(r"for (\S+) s a plug-in has held", done.stderr)[1])
        assert 0.4 <= held < 240  # the clock of a process that has just begun


def test_a_plugin_of_an_installed_package_that_holds_the_loop_ends_the_process(tmp_path: Path):
    """It is told from what the library asks of packages by who called it."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed/tool_of_a_package.py").write_text("import time\nasync def execute():\n    time.sleep(3600)\n")
    work = """
    import sys
    from polyturn.core import code_origin
    from polyturn.infra.deadline import CallWithDeadline
    folder = __file__.rpartition("/")[0] + "/installed/"
    sys.path.insert(0, folder)
    code_origin.PACKAGES = (*code_origin.PACKAGES, folder)
    from tool_of_a_package import execute
    await CallWithDeadline(name="tool", timeout_s=0.1).run(execute)
    """
    done = ended(tmp_path, work)
    assert done.returncode == 2 and "the event loop: execute" in done.stderr, done.stderr


def test_it_is_said_also_where_what_stands_holds_the_lock_of_the_console(tmp_path: Path):
    done = ended(tmp_path, "logging.root.handlers[0].acquire()\ntime.sleep(3600)")
    assert done.returncode == 2 and "the event loop: work" in done.stderr


def test_a_cycle_that_nobody_has_collected_is_collected_beside_the_end_of_the_run(tmp_path: Path):
    done = ended(tmp_path, "Stands()", then="gc.collect()", held_s=60)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "because it stands still: Stands.__del__" in done.stderr


@pytest.mark.parametrize(
    "work",
    each(
        4,
        [
            "for _ in range(8):\n    time.sleep(0.2)\n    await asyncio.sleep(0)",
            "for _ in range(8):\n    Stands(0.2)\n    gc.collect()\n    await asyncio.sleep(0.5)",
            "await asyncio.to_thread(time.sleep, 2)",
            "await asyncio.sleep(2)",
        ],
    ),
)
def test_nobody_is_ended_who_goes_on(tmp_path: Path, work: str):
    done = ended(tmp_path, work, held_s=1.2)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_coroutines_that_come_and_go_are_looked_at_without_harm(tmp_path: Path):
    """Their stacks are written down at once: to follow the frames of a thread that runs has ended Python 3.11 itself."""
    work = """
    standstill._LOOK_S = 0.0
    async def deep(depth):
        await (deep(depth - 1) if depth else asyncio.sleep(0))
    async def busy():
        for _ in range(3000):
            await deep(20)
    await asyncio.gather(*(busy() for _ in range(8)))
    """
    done = ended(tmp_path, work, held_s=60)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


def test_a_worker_ends_whose_loop_stands_in_another_thread_than_the_main_one(tmp_path: Path):
    """As on a cluster: somebody else runs the loop, and between two episodes nothing of the library is on its stack."""
    work = """
    async def of_worker():
        standstill.Standstill(asyncio.get_running_loop(), deadline_s=0.4, of_worker=True)
        await asyncio.sleep(2)
        time.sleep(3600)
    await asyncio.to_thread(asyncio.run, of_worker())
    """
    done = ended(tmp_path, work, held_s=60)
    assert done.returncode == 2 and "the event loop: work.<locals>.of_worker" in done.stderr, done.stderr
    assert "another worker takes its episodes" in done.stderr


def test_a_person_may_look_at_it_with_a_debugger(tmp_path: Path):
    work = """
    debugger = pdb.Pdb(nosigint=True)
    debugger.cmdloop = lambda *a: (time.sleep(3), debugger.set_continue())
    debugger.set_trace()
    """
    done = ended(tmp_path, work)
    assert (done.returncode, done.stderr) == (0, "")
