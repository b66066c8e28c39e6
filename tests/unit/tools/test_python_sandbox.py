"""PythonSandbox: the model's code runs isolated, remembers its variables in an episode, and is gone after it.

Needs bubblewrap (`make system`); skipped with that sentence where it is missing. The attempts to get out are those of
benchmarks/sandbox_escapes.py, the quick ones here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from polyturn.core.errors import ConfigError, ToolError
from polyturn.serving.rules import ServerRules
from polyturn.serving.sandbox import SandboxService, create_app
from polyturn.tools.python_sandbox import PythonSandbox, SandboxLimits, WarmPool, interpreter
from polyturn.tools.python_sandbox.cgroup import make_group
from polyturn.tools.python_sandbox.fusion import reply_of
from polyturn.tools.python_sandbox.interpreter import MAX_FETCHED_BYTES, Interpreter, SandboxStartError
from polyturn.tools.python_sandbox.isolation import Isolation, bare_python, find_isolation, require_isolation
from polyturn.tools.python_sandbox.seccomp import filter_program
from polyturn.tools.registry import initialize_tools_from_config
from polyturn.tools.sandbox import read_reply
from polyturn.tools.service import ServiceReply

ROOT = Path(__file__).resolve().parents[3]
ISOLATION, WHY = find_isolation()
isolated = pytest.mark.skipif(ISOLATION is Isolation.NONE, reason=f"code cannot be isolated here: {WHY}")


def _load_attempts() -> Any:
    spec = importlib.util.spec_from_file_location("sandbox_escapes", ROOT / "benchmarks/sandbox_escapes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ESCAPES = _load_attempts()
SLOW = {"many_files_on_disk", "infinite_stderr", "shared_memory_flood", "sleep_for_ever", "zip_bomb", "huge_integer"}
SLOW |= {"loop_for_ever", "deep_recursion", "flood_of_answers", "fork_bomb", "memory_bomb_of_many", "swallow_the_timeout"}
SLOW |= {"thread_bomb", "fill_the_disk", "ignore_the_alarm", "crash_the_interpreter", "one_huge_object"}


def start(**limits: Any) -> Interpreter:
    return Interpreter(SandboxLimits(**limits), isolation=ISOLATION, python=bare_python())


@pytest.fixture
def sandbox() -> Iterator[Interpreter]:
    made = start(timeout_s=5.0)
    yield made
    made.close()


@isolated
def test_quick_attempts_to_get_out_are_contained() -> None:
    limits = SandboxLimits(timeout_s=0.4, memory_mb=128, processes=16, disk_mb=4, output_bytes=20_000, flood_bytes=1 << 20)
    with ESCAPES.place() as outside:
        found = ESCAPES.attempts(outside)
        assert len(found) >= 40
        wrong = {name: ESCAPES.attempt(name, code, outside, limits)[0] for name, code in found.items() if name not in SLOW}
    assert {name: why for name, why in wrong.items() if why} == {}


@isolated
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
def test_attempts_of_an_ordinary_users_sandbox_are_contained_too() -> None:
    names = ["memory_bomb", "network_to_the_host", "write_outside", "proc_switches", "signal_the_parent", "system_calls"]
    names += ["free_the_first_process", "outlive_the_trainer", "daemon", "memory_that_no_limit_counts"]
    names += [
        "what_all_processes_of_a_user_share",
        "lock_files_of_the_machine",
        "one_large_answer",
        "let_a_stopped_process_go_on",
    ]
    as_user: dict[str, Any] = {"user": 54321, "group": 54321, "extra_groups": [], "cwd": "/", "capture_output": True}
    as_user["env"] = {
        "PATH": os.environ["PATH"],
        "HOME": "/tmp",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path[1:]]),
    }
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        try:
            script = str(ROOT / "benchmarks/sandbox_escapes.py")
            done = subprocess.run([python, "-B", script, "--no-speed", "--only", *names], text=True, **as_user)
        except OSError:
            continue
        if done.stdout:
            said = json.loads(done.stdout)
            assert (said["attempts"], said["escaped"]) == (len(names), {}), said
            assert said["isolation"] == Isolation.USER.value
            return
    pytest.skip("another user of this machine can run no Python with these packages, or no bubblewrap")


@isolated
@pytest.mark.slow
def test_every_attempt_to_get_out_is_contained() -> None:
    with ESCAPES.place() as outside:
        wrong = {n: ESCAPES.attempt(n, code, outside)[0] for n, code in ESCAPES.attempts(outside).items()}
    assert {name: why for name, why in wrong.items() if why} == {}


@isolated
def test_ends_of_a_run_are_told_apart(sandbox: Interpreter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "GRACE_S", 60.0)
    ended = [sandbox.run(code) for code in ("1", "1/0", "raise SystemExit(3)", "x = 'x' * (1 << 33)")]
    assert [(r.status, r.exit_code) for r in ended] == [("ok", 0), ("error", 1), ("exit", 3), ("error", 1)]
    assert "ZeroDivisionError" in ended[1].stderr and "worker" not in ended[1].stderr and "MemoryError" in ended[3].stderr
    late = sandbox.run("while True: pass", timeout_s=0.2)
    assert (late.status, late.exit_code, late.is_alive) == ("timeout", None, True)
    gone = sandbox.run("import os; os._exit(4)")
    assert (gone.status, gone.exit_code, gone.is_alive) == ("exit", 4, False)
    assert sandbox.run("1").status == "killed"


@isolated
def test_variables_survive_a_timeout_that_the_code_notices(sandbox: Interpreter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "GRACE_S", 60.0)  # else a busy machine may not let it notice in time
    sandbox.run("x = 41")
    assert sandbox.run("import time\ntime.sleep(9)", timeout_s=0.1).status == "timeout"
    assert sandbox.run("x + 1").stdout == "42\n"


@isolated
def test_stdout_and_stderr_are_apart_and_bounded() -> None:
    sandbox = start(output_bytes=100)
    result = sandbox.run("import sys\nprint('o' * 500)\nprint('e', file=sys.stderr)")
    assert (result.stdout, result.stderr, result.is_truncated) == ("o" * 100, "e\n", True)
    sandbox.close()


@isolated
def test_a_forged_answer_to_the_next_question_is_nobodys(sandbox: Interpreter) -> None:
    forged = """
import os, json
for n in range(3, 64):
    try: os.write(n, json.dumps({"id": "ready", "status": "ok", "exit_code": 0}).encode() + b"\\n")
    except OSError: pass
"""
    sandbox.run(forged)
    assert sandbox.run("1/0").status == "error"


ANSWER = """
import os, sys
frame = sys._getframe()
while "replies" not in frame.f_locals: frame = frame.f_back
asked, channel = frame.f_locals["request"]["id"].encode(), frame.f_locals["replies"]
"""


@isolated
@pytest.mark.parametrize(
    ("line", "status", "exit_code", "files"),
    [
        ('{"id": "%s", "status": "ok", "exit_code": 0, "sizes": [2]}\\nhi', "ok", 0, {"a": "aGk="}),
        ('{"id": "%s", "status": ["x"], "exit_code": 1e3, "sizes": {"a": 1}}\\n', "error", None, {}),
        ('{"id": "%s", "status": "sandbox_error", "exit_code": true, "sizes": ["9"]}\\n', "error", None, {}),
        ('{"id": "%s", "status": "exit", "exit_code": 300, "sizes": [99000000000]}\\n', "exit", None, {}),
        ('{"id": "%s", "status": "exit", "exit_code": -9, "sizes": [-1]}\\n', "exit", None, {}),
        ('{"id": "%s", "files": {"a": "\\\\ud800"}, "sizes": [null]}\\n', "error", None, {}),
        ('["%s"]\\n', "exit", 7, {}),
        ('{"id": ["%s"]}\\n', "exit", 7, {}),
        ('{"id": "%s", "a": ' + "[" * 600 + "\\n", "exit", 7, {}),
        ("half a line %s", "exit", 7, {}),
    ],
)
def test_an_answer_is_no_more_than_what_was_asked_for(
    sandbox: Interpreter, line: str, status: str, exit_code: int | None, files: dict[str, str]
) -> None:
    code = ANSWER + f"os.write(channel, b'{line}' % asked)\nimport time; time.sleep(0.2)\nraise SystemExit(7)"
    result = sandbox.run_program(code, fetch=["a"])
    assert (result.status, result.exit_code, result.files) == (status, exit_code, files), result
    assert json.dumps(reply_of(result)).encode("utf-8"), "a service can say it"


@isolated
def test_a_file_that_is_too_large_is_not_handed_back_and_the_others_are(sandbox: Interpreter) -> None:
    code = f"open('a', 'wb').write(bytes(3))\nopen('b', 'wb').write(bytes({MAX_FETCHED_BYTES}))\nopen('c', 'w').write('hi')"
    assert sandbox.run_program(code, fetch=["a", "b", "c", "none", "\0"]).files == {"a": "AAAA", "c": "aGk="}


def processor_time(inside: set[int]) -> dict[int, int]:
    """Return what each process has had of it, in nanoseconds."""
    tasks = {pid: Path(f"/proc/{pid}/task").glob("*/schedstat") for pid in inside}
    return {pid: sum(int(path.read_text().split()[0]) for path in of) for pid, of in tasks.items()}


@isolated
def test_what_a_call_left_running_stands_still_until_the_next_one(sandbox: Interpreter) -> None:
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
    threading.Event().wait(0.1)  # the last that they do is to stop
    before = processor_time(inside)
    threading.Event().wait(0.5)
    assert processor_time(inside) == before
    seen = "n = {k: open(k).read() for k in ('thread', 'daemon')}\nimport time\n"
    more = sandbox.run(seen + "while any(open(k).read() in (n[k], '') for k in n): pass\nprint('both go on')")
    assert more.stdout == "both go on\n", more


@isolated
def test_nothing_inside_lets_go_on_what_stands_still(sandbox: Interpreter) -> None:
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
    threading.Event().wait(0.1)  # the last that they do is to stop
    before = processor_time(inside)
    threading.Event().wait(0.5)
    assert processor_time(inside) == before and len(inside) >= 5


@isolated
def test_a_sandbox_that_does_not_stand_still_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = start()
    monkeypatch.setattr("polyturn.tools.python_sandbox.interpreter.stand_still", lambda first: False)
    result = sandbox.run("print(1)")
    assert (result.status, result.stdout, result.is_alive, sandbox.is_alive) == ("ok", "1\n", False, False)


@isolated
def test_a_run_from_another_thread_ends_when_the_sandbox_is_stopped() -> None:
    sandbox = start()
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(sandbox.run("import time\ntime.sleep(99)")))
    thread.start()
    sandbox.stop()
    thread.join()
    sandbox.close()
    assert results[0].status == "killed"


@isolated
def test_a_program_reads_its_stdin_and_files_and_hands_files_back(sandbox: Interpreter) -> None:
    code = "n = int(input())\nopen('out', 'w').write(open('d/in').read() * n)\nprint(__name__)"
    result = sandbox.run_program(code, stdin="2\n", files={"d/in": "YWI="}, fetch=["out", "none"])
    assert (result.status, result.stdout, result.files) == ("ok", "__main__\n", {"out": "YWJhYg=="})


@isolated
def test_the_pool_keeps_sandboxes_ready_and_closes_them() -> None:
    made = []

    def remember() -> Interpreter:
        made.append(start())
        return made[-1]

    pool = WarmPool(remember, size=1, keep_s=0.05)
    pool.open()
    sandbox = pool.take()
    assert sandbox.run("1").status == "ok"
    sandbox.close()
    pool.close()
    pool.let_go()
    assert not any(one.is_alive for one in made)


def test_a_pool_that_cannot_start_says_so() -> None:
    def fail() -> Interpreter:
        raise SandboxStartError("no room")

    pool = WarmPool(fail, size=1, keep_s=0.05)
    pool.open()
    with pytest.raises(SandboxStartError, match="no room"):
        pool.take()
    pool.close()


async def run_all(tool: PythonSandbox, *codes: str) -> list[tuple[str, str]]:
    instance_id, _ = await tool.create()
    said = []
    for code in codes:
        response, reward, metrics = await tool.execute(instance_id, {"code": code})
        assert reward is None
        said.append((metrics["status"], str(response.text)))
    await tool.release(instance_id)
    assert tool._instance_dict == {}
    tool._pool.let_go()
    return said


@isolated
async def test_variables_belong_to_one_episode() -> None:
    tool = PythonSandbox({"warm": 0})
    assert await run_all(tool, "x = 6", "x * 7") == [("ok", "The code ran and printed nothing."), ("ok", "42\n")]
    ((status, text),) = await run_all(tool, "x")
    assert status == "error" and "NameError" in text


@isolated
async def test_a_sandbox_that_died_is_replaced_and_the_model_is_told() -> None:
    said = await run_all(PythonSandbox({"warm": 0}), "x = 1", "import os; os._exit(4)", "print('new')")
    assert said[1:] == [("exit", "The code ended with exit code 4. Its variables are gone."), ("ok", "new\n")]


def test_code_is_refused_where_it_cannot_be_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyturn.tools.python_sandbox.isolation.find_isolation", lambda: (Isolation.NONE, "no bubblewrap"))
    with pytest.raises(ConfigError, match=r"no bubblewrap\. Untrusted code is refused; set allow_unsafe"):
        PythonSandbox({})
    assert require_isolation(allow_unsafe=True) is Isolation.NONE


def test_without_isolation_limits_hold_and_daemons_end(tmp_path: Path) -> None:
    sandbox = Interpreter(SandboxLimits(timeout_s=5.0, memory_mb=128), isolation=Isolation.NONE, python=bare_python())
    note = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    sandbox.run(f"import os, time\nif os.fork() == 0:\n    os.setsid()\n    {note}\n    time.sleep(99)\ntime.sleep(0.3)")
    assert "MemoryError" in sandbox.run("bytearray(1 << 30)").stderr
    sandbox.close()
    assert not ESCAPES.is_running(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"timeot": 3}, "no setting 'timeot'. Did you mean 'timeout'"),
        ({"timeout": 0}, "timeout_s is 0; it is a positive number"),
        ({"num_workers": 0}, "num_workers is 0; it is a whole number from 1 on"),
        ({"python": "/nowhere/python"}, "python is '/nowhere/python', which is no interpreter that starts"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        PythonSandbox(config | {"allow_unsafe": True})


def test_no_control_group_where_none_is_lent(tmp_path: Path) -> None:
    assert make_group("polyturn-sandbox-1-x", memory_mb=9, processes=9, root=tmp_path) is None


def test_the_filter_is_whole_instructions_and_unknown_machines_have_none() -> None:
    assert all(len(filter_program(machine) or b"x") % 8 == 0 for machine in ("x86_64", "aarch64"))
    assert filter_program("vax") is None


@isolated
def test_the_tool_of_the_guide_loads() -> None:
    guide = (ROOT / "docs/guides/sandbox.md").read_text().partition("```yaml")[2].partition("```")[0]
    (tool,) = initialize_tools_from_config(yaml.safe_load(guide))
    assert (tool.name, type(tool)) == ("python", PythonSandbox)


def service(**changes: Any) -> SandboxService:
    settings: dict[str, Any] = {"limits": SandboxLimits(timeout_s=5.0), "max_concurrent": 2, "max_waiting": 2, "warm": 0}
    return SandboxService(lambda: start(timeout_s=5.0), **(settings | changes))


async def post(body: Any, *, app: Any = None, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(service()) if app is None else app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        given = {"content": body} if isinstance(body, bytes) else {"json": body}
        return await client.post("/run_code", headers=headers, **given)  # type: ignore[arg-type]


@isolated
async def test_the_server_runs_a_program_as_the_tool_expects() -> None:
    reply = await post(
        {"code": "print(int(input()) * 2)", "language": "python", "stdin": "21", "run_timeout": 4, "files": {}}
    )
    said = reply.json()
    assert said["status"] == "Success" and said["run_result"]["return_code"] == 0
    assert read_reply(ServiceReply(status="ok", data=said, num_tries=1), timeout_s=4) == ("finished", "42\n")


@isolated
@pytest.mark.parametrize(
    ("code", "status"), [("1/0", "code_error"), ("while True: pass", "code_timeout"), ("raise SystemExit(3)", "code_error")]
)
async def test_the_server_tells_failures_apart(code: str, status: str) -> None:
    said = (await post({"code": code, "run_timeout": 0.3})).json()
    assert said["status"] == "Failed"
    assert read_reply(ServiceReply(status="ok", data=said, num_tries=1), timeout_s=0.3)[0] == status


@isolated
@pytest.mark.parametrize(("limit", "status"), [(100, "code_error"), (-1, "finished"), (None, "finished"), (1e9, "finished")])
async def test_the_server_keeps_a_program_to_less_memory_where_it_is_asked_to(limit: float | None, status: str) -> None:
    said = (await post({"code": "len(bytearray(150 << 20))", "memory_limit_MB": limit})).json()
    assert read_reply(ServiceReply(status="ok", data=said, num_tries=1), timeout_s=4)[0] == status


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"code": "", "memory_limit_MB": "1G"}, 422, "memory_limit_MB is '1G'"),
        (b"{", 422, "the body is not JSON"),
        (b"[" * 100_000, 422, "the body is not JSON"),
        ([], 422, "not a JSON object"),
        ({"code": 1}, 422, "with `code`"),
        ({"code": "", "language": "rust"}, 422, "language is 'rust'; this server runs python"),
        ({"code": "", "run_timeout": -1}, 422, "run_timeout is -1"),
        ({"code": "", "stdin": 5}, 422, "stdin is a text"),
        ({"code": "", "files": {"a": 1}}, 422, "contents in base64"),
        ({"code": "", "fetch_files": "a"}, 422, "list of names"),
        ({"code": "", "fetch_files": ["a"] * 257}, 422, "257 names; ask for 256 at most"),
        (b" " * (9 << 20), 413, "larger than"),
    ],
)
async def test_a_wrong_request_is_answered_with_a_sentence(body: Any, status: int, sentence: str) -> None:
    reply = await post(body)
    assert (reply.status_code, sentence in reply.json()["detail"]) == (status, True), reply.text


async def test_the_server_demands_its_token_and_refuses_web_pages() -> None:
    app = create_app(service(), rules=ServerRules(token="open sesame"))
    assert (await post({"code": "1"}, app=app)).status_code == 401
    assert (await post({"code": "1"}, app=app, authorization="Bearer open")).status_code == 401
    assert (await post({}, app=app, authorization="Bearer open sesame")).status_code == 422
    assert (await post({"code": "1"}, origin="http://evil.example")).status_code == 403


async def test_the_server_says_when_too_many_wait() -> None:
    full = create_app(service(max_concurrent=1, max_waiting=-1))
    assert (await post({"code": "1"}, app=full)).status_code == 503


@isolated
async def test_a_call_without_code_is_refused_in_a_sentence() -> None:
    with pytest.raises(ToolError, match=r"the argument 'code' is missing; there are \['cod'\]"):
        await PythonSandbox({"warm": 0}).execute("episode", {"cod": "1"})
