"""`run_loop` and `end_process`: nothing that plug-ins leave behind keeps a process, and everything that is left is named.

Each program runs in a process of its own, because what is tested is that the process ends.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

from polyturn.core.errors import RolloutError
from polyturn.core.run_loop import run_loop

PROGRAM = """
import asyncio, atexit, logging, os, signal, sys, threading, time
from polyturn.cli.end_process import end_process
from polyturn.core.run_loop import run_loop
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
sys.modules["polyturn.core.run_loop"].GRACE_S, sys.modules["polyturn.core.run_loop"].END_S = 0.2, 1.5
sys.modules["polyturn.cli.end_process"].GRACE_S = 0.5
"""


def ended(work: str, *, then: str = "pass", before: str = "") -> subprocess.CompletedProcess[str]:
    """Return what a program left whose coroutine did `work`."""
    program = PROGRAM.format(before=before, work=textwrap.indent(textwrap.dedent(work), "    "), then=then)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)


LEFT = [
    ("leave(asyncio.create_task(ignores()))", "at the end of the run"),
    ("leave(asyncio.create_task(blocks_at_last())); await asyncio.sleep(0)", "at the end of the run"),
    ("await anext(leave(words()))", "at the end of the run"),
    ("leave(asyncio.create_task(stands_still_when_cancelled())); await asyncio.sleep(0.1)", "because it stands still"),
    ("await anext(leave(stands_still()))", "because it stands still"),
    ("leave(asyncio.create_task(ignores())).get_loop().create_task(exits()); await asyncio.sleep(0)", "SystemExit(7)"),
    ("leave(threading.Thread(target=time.sleep, args=(3600,), name='mine')).start()", "the thread 'mine'"),
    ("leave(asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600))", "the thread 'asyncio_0'"),
    ("atexit.register(time.sleep, 3600)", "an exit handler"),
]
"""Work, and what is said of it."""


def test_what_is_left_is_named_and_keeps_nothing():
    with ThreadPoolExecutor(len(LEFT)) as threads:  # each waits
        ran = threads.map(lambda one: ended(one[0], before=IMPATIENT), LEFT)
    for (_, named), done in zip(LEFT, ran, strict=True):
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
        assert "at the end of the" in done.stderr and "abandoned" in done.stderr and named in done.stderr
        assert not any(words in done.stderr for words in ("Traceback", "was destroyed", "Exception ignored")), done.stderr


def test_nothing_is_said_where_nothing_is_left():
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
    ("then", "code", "said"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('a sentence')", 1, "a sentence\n"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong\n"),
    ],
)
def test_a_process_ends_as_python_would_end_it(then: str, code: int, said: str):
    done = ended("leave(asyncio.create_task(ignores()))", then=then, before=IMPATIENT)
    assert (done.returncode, done.stdout) == (code, "done\n")
    assert done.stderr.endswith(said)


def test_an_error_of_the_coroutine_is_raised_after_the_rest_was_cancelled():
    done = ended(
        "leave(asyncio.create_task(ignores()))\nawait asyncio.sleep(0)\nraise ValueError('wrong')", before=IMPATIENT
    )
    assert done.returncode == 1 and done.stderr.endswith("ValueError: wrong\n")
    assert "abandoned at the end of the run" in done.stderr


@pytest.mark.parametrize(
    ("meddle", "said"),
    [
        (lambda: [task.cancel() for task in asyncio.all_tasks()], "cancelled every task"),
        (lambda: asyncio.get_running_loop().stop(), "stopped the event loop"),
    ],
)
def test_who_ends_what_everything_runs_in_is_told_in_a_sentence(meddle, said: str):
    async def work() -> None:
        asyncio.get_running_loop().call_soon(meddle)
        await asyncio.sleep(60)

    with pytest.raises(RolloutError, match=f"a plug-in .* {said}"):
        run_loop(work())


def test_ctrl_c_ends_a_coroutine_that_plug_ins_surround():
    work = """
    leave(asyncio.create_task(ignores()))
    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), 2)
    await asyncio.sleep(3600)
    """
    done = ended(work, before=IMPATIENT)
    assert done.returncode == 1 and done.stderr.endswith("KeyboardInterrupt\n"), done.stderr
    assert "abandoned at the end of the run" in done.stderr


def test_a_second_ctrl_c_ends_a_coroutine_that_ignores_the_first():
    work = """
    loop = asyncio.get_running_loop()
    loop.call_later(0.1, os.kill, os.getpid(), 2)
    loop.call_later(0.2, os.kill, os.getpid(), 2)
    await ignores()
    """
    done = ended(work, before=IMPATIENT)
    assert done.returncode == 1 and "KeyboardInterrupt" in done.stderr, done.stderr
    assert "abandoned at the end of the run" in done.stderr


def test_a_loop_can_be_run_after_another():
    async def loop_id() -> int:
        return id(asyncio.get_running_loop())

    assert isinstance(run_loop(loop_id()), int) and isinstance(run_loop(loop_id()), int)
