"""PythonSandbox: the model's code runs isolated, keeps its variables within an episode, and is gone after it.

The attempts to escape are those of benchmarks/sandbox_escapes.py, the quick ones in `make test`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyturn.core.errors import ConfigError, ToolError
from polyturn.sandbox.python import interpreter, standstill
from polyturn.sandbox.python.cgroup import make_group
from polyturn.sandbox.python.fusion import reply_of
from polyturn.sandbox.python.interpreter import MAX_FETCHED_BYTES, Interpreter
from polyturn.sandbox.python.isolation import Isolation, bare_python, find_isolation, interpreter_folders, require_isolation
from polyturn.sandbox.python.limits import SandboxLimits
from polyturn.sandbox.python.pool import WarmPool
from polyturn.sandbox.python.seccomp import filter_program
from polyturn.tools.python_sandbox import PythonSandbox
from polyturn.tools.registry import initialize_tools_from_config
from support.benchmark import load_benchmark
from support.isolated import need_isolation, start_sandbox
from support.refusals import refuses

pytestmark = pytest.mark.timeout(300)  # processes start, and a busy machine takes long to import what they need

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 50.0
"""What code that ends may take."""

ESCAPES = load_benchmark("sandbox_escapes")
SLOW = {"many_files_on_disk", "infinite_stderr", "shared_memory_flood", "sleep_for_ever", "zip_bomb", "huge_integer"}
SLOW |= {"loop_for_ever", "deep_recursion", "flood_of_answers", "fork_bomb", "memory_bomb_of_many", "swallow_the_timeout"}
SLOW |= {"thread_bomb", "fill_the_disk", "ignore_the_alarm", "crash_the_interpreter", "one_huge_object"}
OF_A_USER = ["memory_bomb", "network_to_the_host", "write_outside", "proc_switches", "signal_the_parent", "system_calls"]
OF_A_USER += ["free_the_first_process", "outlive_the_trainer", "daemon", "memory_that_no_limit_counts", "one_large_answer"]
OF_A_USER += ["what_all_processes_of_a_user_share", "lock_files_of_the_machine", "let_a_stopped_process_go_on"]


@pytest.fixture
def sandbox() -> Iterator[Interpreter]:
    made = start_sandbox(timeout_s=TIMEOUT_S)
    yield made
    made.close()


# ---- isolation ------------------------------------------------------------------------------------------------------


def test_quick_attempts_to_escape_are_contained() -> None:
    need_isolation()
    limits = SandboxLimits(
        timeout_s=TIMEOUT_S, memory_mb=128, processes=16, disk_mb=4, output_bytes=20_000, flood_bytes=1 << 20
    )
    with ESCAPES.targets() as outside:
        found = ESCAPES.attempts(outside)
        assert len(found) >= 40
        wrong = {
            name: ESCAPES.attempt(name, code, outside, limits, slack_s=None)[0]
            for name, code in found.items()
            if name not in SLOW
        }
    assert {name: why for name, why in wrong.items() if why} == {}


@pytest.mark.slow
def test_every_attempt_to_escape_is_contained() -> None:
    need_isolation()
    with ESCAPES.targets() as outside:
        wrong = {n: ESCAPES.attempt(n, code, outside, slack_s=None)[0] for n, code in ESCAPES.attempts(outside).items()}
    assert {name: why for name, why in wrong.items() if why} == {}


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
def test_attempts_in_an_ordinary_users_sandbox_are_contained() -> None:
    need_isolation()
    as_user: dict[str, Any] = {"user": 54321, "group": 54321, "extra_groups": [], "cwd": "/", "capture_output": True}
    path = os.pathsep.join([str(ROOT / "src"), *sys.path[1:]])
    as_user["env"] = {"PATH": os.environ["PATH"], "HOME": "/tmp", "PYTHONPATH": path}
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        try:
            script = str(ROOT / "benchmarks/sandbox_escapes.py")
            done = subprocess.run([python, "-B", script, "--no-speed", "--only", *OF_A_USER], text=True, **as_user)
        except OSError:
            continue
        if done.stdout:
            report = json.loads(done.stdout)
            assert (report["attempts"], report["escaped"]) == (len(OF_A_USER), {}), report
            assert report["isolation"] == Isolation.USER.value
            return
    pytest.skip("another user of this machine can run no Python with these packages, or no bubblewrap")


def test_code_is_refused_where_bubblewrap_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyturn.sandbox.python.isolation.find_isolation", lambda: (Isolation.NONE, "no bubblewrap"))
    refuses(lambda: PythonSandbox({}), ConfigError, "no bubblewrap", "allow_unsafe")
    assert require_isolation(allow_unsafe=True) is Isolation.NONE


@pytest.mark.parametrize("problem", [subprocess.TimeoutExpired("bwrap", 20), PermissionError("no bwrap")])
def test_trial_of_bubblewrap_that_fails_is_a_reason(problem: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: Any) -> None:
        raise problem

    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/" + name)
    interpreter_folders(sys.executable)  # cached from here on
    monkeypatch.setattr("subprocess.run", run)
    isolation, why = find_isolation.__wrapped__()
    assert isolation is Isolation.NONE and "bwrap" in why


def test_limits_hold_and_daemons_end_without_isolation(tmp_path: Path) -> None:
    sandbox = Interpreter(SandboxLimits(timeout_s=TIMEOUT_S, memory_mb=128), isolation=Isolation.NONE, python=bare_python())
    note = str(tmp_path / "pid")
    sandbox.run(
        "import os, time\n"
        f"if os.fork() == 0:\n    os.setsid()\n    open({note + '.new'!r}, 'w').write(str(os.getpid()))\n"
        f"    os.rename({note + '.new'!r}, {note!r})\n    time.sleep(3600)\n"
        f"while not os.path.exists({note!r}): time.sleep(0.01)"
    )
    assert "MemoryError" in sandbox.run("bytearray(1 << 30)").stderr
    sandbox.close()
    assert not ESCAPES.is_running(int(Path(note).read_text()))


def test_no_control_group_is_made_where_none_is_lent(tmp_path: Path) -> None:
    assert make_group("polyturn-sandbox-1-x", memory_mb=9, processes=9, root=tmp_path) is None


def test_seccomp_filter_is_whole_instructions() -> None:
    assert all(len(filter_program(machine) or b"x") % 8 == 0 for machine in ("x86_64", "aarch64"))
    assert filter_program("vax") is None


# ---- one run --------------------------------------------------------------------------------------------------------


def test_ends_of_a_run_are_told_apart(sandbox: Interpreter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "GRACE_S", TIMEOUT_S)  # a busy machine notices a timeout late
    ended = [sandbox.run(code) for code in ("x = 41", "1/0", "raise SystemExit(3)", "x = 'x' * (1 << 33)")]
    assert [(r.status, r.exit_code) for r in ended] == [("ok", 0), ("error", 1), ("exit", 3), ("error", 1)]
    assert "ZeroDivisionError" in ended[1].stderr
    assert "worker" not in ended[1].stderr, "the frames of the sandbox are not shown"
    assert "MemoryError" in ended[3].stderr
    late = sandbox.run("while True: pass", timeout_s=0.2)
    assert (late.status, late.exit_code, late.is_alive) == ("timeout", None, True)
    assert sandbox.run("x + 1").stdout == "42\n", "variables survive a timeout that the code notices"
    gone = sandbox.run("import os; os._exit(4)")
    assert (gone.status, gone.exit_code, gone.is_alive) == ("exit", 4, False)
    assert sandbox.run("1").status == "killed"


def test_stdout_and_stderr_are_apart_and_bounded() -> None:
    sandbox = start_sandbox(output_bytes=100, timeout_s=TIMEOUT_S)
    result = sandbox.run("import sys\nprint('o' * 500)\nprint('e', file=sys.stderr)")
    assert (result.stdout, result.stderr, result.is_truncated) == ("o" * 100, "e\n", True)
    sandbox.close()


ANSWER = """
import os, sys
frame = sys._getframe()
while "replies" not in frame.f_locals: frame = frame.f_back
asked, channel = frame.f_locals["request"]["id"].encode(), frame.f_locals["replies"]
"""


@pytest.mark.parametrize(
    ("line", "status", "exit_code", "files"),
    [
        ('{"id": "%s", "status": "ok", "exit_code": 0, "sizes": [2]}\\nhi', "ok", 0, {"a": "aGk="}),
        ('{"id": "%s", "status": ["x"], "exit_code": 1e3, "sizes": {"a": 1}}\\n', "error", None, {}),
        ('{"id": "%s", "status": "exit", "exit_code": 300, "sizes": [99000000000]}\\n', "exit", None, {}),
        ('{"id": "%s", "files": {"a": "\\\\ud800"}, "sizes": [null]}\\n', "error", None, {}),
        ('["%s"]\\n', "exit", 7, {}),
        ("half a line %s", "exit", 7, {}),
    ],
)
def test_forged_answer_has_only_the_requested_files(
    sandbox: Interpreter, line: str, status: str, exit_code: int | None, files: dict[str, str]
) -> None:
    code = ANSWER + f"os.write(channel, b'{line}' % asked)\nraise SystemExit(7)"
    result = sandbox.run_program(code, fetch=["a"])
    assert (result.status, result.exit_code, result.files) == (status, exit_code, files), result
    assert json.dumps(reply_of(result)).encode("utf-8"), "a service can send it"


def test_forged_answer_to_the_next_question_is_ignored(sandbox: Interpreter) -> None:
    forged = """
import os, json
for n in range(3, 64):
    try: os.write(n, json.dumps({"id": "ready", "status": "ok", "exit_code": 0}).encode() + b"\\n")
    except OSError: pass
"""
    sandbox.run(forged)
    assert sandbox.run("1/0").status == "error"


def test_program_reads_stdin_and_files_and_returns_files(sandbox: Interpreter) -> None:
    code = (
        f"n = int(input())\nopen('out', 'w').write(open('d/in').read() * n)\nprint(__name__)\n"
        f"open('large', 'wb').write(bytes({MAX_FETCHED_BYTES + 1}))"
    )
    result = sandbox.run_program(code, stdin="2\n", files={"d/in": "YWI="}, fetch=["large", "out", "none", "\0"])
    assert (result.status, result.stdout, result.files) == ("ok", "__main__\n", {"out": "YWJhYg=="})


# ---- between two runs -----------------------------------------------------------------------------------------------


def processor_times(inside: set[int]) -> dict[int, int]:
    """Return the nanoseconds of processor time that each process has had."""
    tasks = {pid: Path(f"/proc/{pid}/task").glob("*/schedstat") for pid in inside}
    return {pid: sum(int(path.read_text().split()[0]) for path in of) for pid, of in tasks.items()}


def wait_until_still(inside: set[int]) -> None:
    """Wait until no process works any more; the last that each does is to stop."""
    before: dict[int, int] = {}
    while before != (before := processor_times(inside)):
        time.sleep(0.3)


def test_processes_left_by_a_call_stand_still_until_the_next(sandbox: Interpreter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "LIMIT_S", TIMEOUT_S)
    left = """
import os, threading, time
def count(path):
    n = 0
    while True:
        n += 1
        open(path, "w").write(str(n))
threading.Thread(target=count, args=("thread",), daemon=True).start()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: count("daemon")
    os._exit(0)
while not (os.path.exists("thread") and os.path.exists("daemon")): pass
"""
    assert sandbox.run(left).status == "ok"
    inside = ESCAPES.processes_of(sandbox) - {sandbox.pid}
    assert len(inside) >= 3, "the first process, the worker and the daemon"
    wait_until_still(inside)
    seen = "n = {k: open(k).read() for k in ('thread', 'daemon')}\nimport time\n"
    more = sandbox.run(seen + "while any(open(k).read() in (n[k], '') for k in n): pass\nprint('both go on')")
    assert more.stdout == "both go on\n", more


def test_stopped_processes_cannot_wake_each_other(sandbox: Interpreter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "LIMIT_S", TIMEOUT_S)
    each_other = """
import os, signal, time
if (third := os.fork()) == 0:
    while True: time.sleep(0.001)
reads, writes = os.pipe()
if (first := os.fork()) == 0:
    second = int(os.read(reads, 20))
elif (second := os.fork()):
    os.write(writes, str(second).encode())
    time.sleep(0.3)
while os.getpid() in (first, second) or not (first and second):
    for pid in (first, second, third):
        try: pid and os.kill(pid, signal.SIGCONT)
        except OSError: pass
"""
    assert sandbox.run(each_other).status == "ok"
    inside = ESCAPES.processes_of(sandbox) - {sandbox.pid}
    assert len(inside) >= 5
    wait_until_still(inside)


def test_sandbox_that_does_not_stand_still_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = start_sandbox(timeout_s=TIMEOUT_S)
    monkeypatch.setattr("polyturn.sandbox.python.interpreter.stand_still", lambda first: False)
    result = sandbox.run("print(1)")
    assert (result.status, result.stdout, result.is_alive, sandbox.is_alive) == ("ok", "1\n", False, False)


def test_run_in_another_thread_ends_when_the_sandbox_stops() -> None:
    sandbox = start_sandbox(timeout_s=3600.0)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(sandbox.run("import time\ntime.sleep(3600)")))
    thread.start()
    sandbox.stop()
    thread.join()
    sandbox.close()
    assert results[0].status == "killed"


def test_pool_keeps_sandboxes_ready_and_closes_them() -> None:
    made = []

    def remember() -> Interpreter:
        made.append(start_sandbox(timeout_s=TIMEOUT_S))
        return made[-1]

    need_isolation()
    pool = WarmPool(remember, size=1, keep_s=0.05)
    pool.open()
    sandbox = pool.take()
    assert sandbox.run("1").status == "ok"
    sandbox.close()
    pool.close()
    pool.let_go()
    assert not any(one.is_alive for one in made)


# ---- the tool -------------------------------------------------------------------------------------------------------


async def run_all(tool: PythonSandbox, *codes: str) -> list[tuple[str, str]]:
    need_isolation()
    instance_id, _ = await tool.create()
    said = []
    for code in codes:
        response, reward, metrics = await tool.execute(instance_id, {"code": code})
        assert reward is None
        said.append((metrics["status"], str(response.text)))
    await tool.release(instance_id)
    with pytest.raises(KeyError):
        await tool.release(instance_id)
    return said


async def test_variables_belong_to_one_episode() -> None:
    need_isolation()
    tool = PythonSandbox({"warm": 0, "timeout": TIMEOUT_S})
    assert await run_all(tool, "x = 6", "x * 7") == [("ok", "The code ran and printed nothing."), ("ok", "42\n")]
    ((status, text),) = await run_all(tool, "x")
    assert (status, "NameError" in text) == ("error", True)


async def test_dead_sandbox_is_replaced_and_the_model_hears_of_it() -> None:
    need_isolation()
    tool = PythonSandbox({"warm": 0, "timeout": TIMEOUT_S})
    said = await run_all(tool, "x = 1", "import os; os._exit(4)", "print('new')")
    assert said[1:] == [("exit", "The code ended with exit code 4. Its variables are gone."), ("ok", "new\n")]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"timeot": 3}, "'timeot'. Did you mean 'timeout'"),
        ({"timeout": 0}, "timeout is 0"),
        ({"num_workers": 0}, "num_workers is 0"),
        ({"python": "/nowhere/python"}, "'/nowhere/python'"),
    ],
)
def test_setting_that_cannot_work_is_a_config_error(config: dict[str, Any], message: str) -> None:
    refuses(lambda: PythonSandbox(config | {"allow_unsafe": True}), ConfigError, message)


async def test_call_without_code_is_a_tool_error() -> None:
    with pytest.raises(ToolError, match=r"'code'.*'cod'"):
        await PythonSandbox({"warm": 0, "allow_unsafe": True}).execute("episode", {"cod": "1"})


def test_tool_of_the_guide_loads() -> None:
    need_isolation()
    guide = (ROOT / "docs/guides/sandbox.md").read_text().partition("```yaml")[2].partition("```")[0]
    (tool,) = initialize_tools_from_config(yaml.safe_load(guide))
    assert (tool.name, type(tool)) == ("python", PythonSandbox)
