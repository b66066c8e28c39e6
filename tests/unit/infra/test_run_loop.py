"""`run_loop` and `end_process`: nothing that plug-ins leave behind keeps a process, and leftovers are named.

Each program runs in a separate process, whose end is tested.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest

from polyturn.core.errors import RolloutError
from polyturn.infra.loop import run_loop
from support.refusals import refuses

PROGRAM = """
import asyncio, atexit, logging, os, signal, sys, threading, time
from polyturn.cli.end_process import end_process
from polyturn.infra.loop import run_loop
{before}
LEFT = []
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it

async def ignores():
    while True:
        try:
            await asyncio.sleep(3600)
        except BaseException:
            pass

async def words():
    try:
        yield "a"
    finally:
        await ignores()

async def blocks_at_last():
    try:
        await ignores()
    finally:
        time.sleep(3600)

async def stands_still():
    try:
        yield await asyncio.sleep(0)
        await asyncio.sleep(3600)
    finally:
        time.sleep(3600)

async def stands_still_when_cancelled():
    async for _ in stands_still():
        pass

async def exits():
    try:
        await asyncio.sleep(3600)
    finally:
        sys.exit(7)

def leave(what):
    LEFT.append(what)
    return what

async def work():
{work}
    return "done"

def program():
    print(run_loop(work()))
    {then}

logging.basicConfig(format="%(message)s")
end_process(program)
"""


IMPATIENT = """
sys.modules["polyturn.infra.loop"].GRACE_S, sys.modules["polyturn.infra.loop"].END_S = 0.2, 1.5
sys.modules["polyturn.cli.end_process"].GRACE_S = 0.5
"""


def ended(work: str, *, then: str = "pass", before: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program whose coroutine does `work`."""
    program = PROGRAM.format(before=before, work=textwrap.indent(textwrap.dedent(work), "    "), then=then)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)


@pytest.mark.clock
@pytest.mark.parametrize(
    ("work", "name"),
    [
        ("leave(asyncio.create_task(ignores()))", "at the end of the run"),
        ("leave(asyncio.create_task(blocks_at_last())); await asyncio.sleep(0)", "at the end of the run"),
        ("await anext(leave(words()))", "at the end of the run"),
        (
            "leave(asyncio.create_task(stands_still_when_cancelled())); await asyncio.sleep(0.1)",
            "does not end with the run",
        ),
        ("await anext(leave(stands_still()))", "does not end with the run"),
        ("leave(asyncio.create_task(ignores())).get_loop().create_task(exits()); await asyncio.sleep(0)", "SystemExit(7)"),
        ("leave(threading.Thread(target=time.sleep, args=(3600,), name='mine')).start()", "the thread 'mine'"),
        ("leave(asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600))", "the thread 'asyncio_0'"),
        ("atexit.register(time.sleep, 3600)", "an exit handler"),
    ],
)
def test_leftover_work_is_named_and_does_not_keep_the_process(work: str, name: str) -> None:
    done = ended(work, before=IMPATIENT)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "abandoned" in done.stderr
    assert name in done.stderr
    assert "Traceback" not in done.stderr
    assert "was destroyed" not in done.stderr


@pytest.mark.clock
def test_run_without_leftovers_logs_nothing() -> None:
    work = """
    async def well_behaved():
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            print("cleaned up")
    leave(asyncio.create_task(well_behaved()))
    await asyncio.sleep(0)
    await asyncio.to_thread(time.sleep, 0)
    threading.Thread(target=time.sleep, args=(0.2,)).start()
    atexit.register(print, "exit handlers run")
    """
    done = ended(work)
    assert (done.returncode, done.stdout, done.stderr) == (0, "cleaned up\ndone\nexit handlers run\n", "")


@pytest.mark.parametrize(
    ("then", "code", "ending"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('a sentence')", 1, "a sentence\n"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong\n"),
    ],
)
def test_process_ends_as_python_would_end_it(then: str, code: int, ending: str) -> None:
    done = ended("leave(asyncio.create_task(ignores()))", then=then, before=IMPATIENT)
    assert (done.returncode, done.stdout) == (code, "done\n")
    assert done.stderr.endswith(ending)


@pytest.mark.clock
@pytest.mark.parametrize(
    ("work", "error"),
    [
        ("await asyncio.sleep(0)\nraise ValueError('wrong')", "ValueError: wrong"),
        (
            "asyncio.get_running_loop().call_soon(os.kill, os.getpid(), 2)\nawait asyncio.sleep(3600)",
            "KeyboardInterrupt",
        ),
        (
            "for delay_s in (0.1, 0.2):\n    asyncio.get_running_loop().call_later(delay_s, os.kill, os.getpid(), 2)\n"
            "await ignores()",
            "KeyboardInterrupt",
        ),
    ],
    ids=["error", "ctrl-c", "second ctrl-c"],
)
def test_error_is_raised_after_the_rest_was_cancelled(work: str, error: str) -> None:
    done = ended(f"leave(asyncio.create_task(ignores()))\n{work}", before=IMPATIENT)
    assert done.returncode == 1, done.stderr
    assert error in done.stderr
    assert "is abandoned" in done.stderr


def test_process_started_without_an_output_ends_quietly() -> None:
    done = ended("await asyncio.sleep(0)", before="sys.stdout = None")
    assert (done.returncode, done.stderr) == (0, "")


COMMAND = """
from polyturn.cli.main import guarded
ended = end_process
end_process = lambda run: ended(lambda: guarded(run))
"""


def test_second_interrupt_in_a_task_ends_with_one_sentence() -> None:
    work = """
    async def interrupt_twice():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(interrupt_twice())
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(3600)
    """
    done = ended(work, before=COMMAND)
    assert (done.returncode, done.stderr) == (130, "polyturn: interrupted\n")


@pytest.mark.parametrize(
    "meddle",
    [lambda: [task.cancel() for task in asyncio.all_tasks()], lambda: asyncio.get_running_loop().stop()],
    ids=["cancels all", "stops the loop"],
)
def test_plug_in_that_ends_the_loop_is_a_rollout_error(meddle: Callable[[], None]) -> None:
    async def work() -> None:
        asyncio.get_running_loop().call_soon(meddle)
        await asyncio.sleep(60)

    refuses(lambda: run_loop(work()), RolloutError, "a plug-in")


def test_loops_can_run_one_after_another() -> None:
    async def loop_id() -> int:
        return id(asyncio.get_running_loop())

    assert isinstance(run_loop(loop_id()), int)
    assert isinstance(run_loop(loop_id()), int)
