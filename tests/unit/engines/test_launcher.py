"""A server is started, awaited and stopped, and leaves nothing behind. Real processes, a real HTTP server."""

import asyncio
import logging
import os
import signal
import stat
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import aiohttp
import pytest

from polyturn.core.errors import EngineError
from polyturn.engines.launcher import LaunchSpec, Server
from polyturn.infra.process import session_of, signal_session
from support.refusals import refuses_later

pytestmark = pytest.mark.timeout(300)  # it waits for processes

SLEEP = "import time; time.sleep(600)"
_SERVE = """
import http.server, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"ok")
    def log_message(self, *a): pass
CHILD
print("serving", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SERVE, ALONE = (_SERVE.replace("CHILD", line) for line in (f"subprocess.Popen([sys.executable, '-c', {SLEEP!r}])", ""))
"""A server with a child process, and one without."""


def spec(code: str = SERVE, **options) -> LaunchSpec:
    return LaunchSpec(
        command=(sys.executable, "-c", code, "{port}"), **{"ready_timeout_s": 120, "stop_timeout_s": 2} | options
    )


async def test_started_server_answers_and_stop_leaves_nothing_behind():
    server = await Server.start(spec())
    async with aiohttp.ClientSession() as session, session.get(server.url + "/health") as reply:
        assert await reply.text() == "ok"
    assert server.tail() == "serving"
    assert len(session_of(server.pid)) == 2, "the server and its child"
    await server.stop()
    assert session_of(server.pid) == []
    assert not server.log.exists()
    await server.stop()


async def test_server_that_ends_early_shows_its_last_lines():
    code = "import sys; print('no such model: x'); sys.exit(3)"
    await refuses_later(lambda: Server.start(spec(code)), EngineError, "status 3", "no such model: x")


async def test_server_that_is_never_ready_is_stopped():
    with pytest.raises(EngineError, match="ready_timeout_s"):
        await Server.start(spec("import time; print('thinking', flush=True); time.sleep(600)", ready_timeout_s=1))


async def test_missing_program_is_named_and_leaves_no_log(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    missing = LaunchSpec(command=("/no/such/python", "-m", "x"), ready_timeout_s=10)
    await refuses_later(lambda: Server.start(missing), EngineError, "/no/such/python")
    assert list(tmp_path.iterdir()) == []


SERVE_WITH_SOCKET = ALONE.replace(
    'print("serving", flush=True)',
    "import os, socket, uuid\n"
    "path = os.path.join(os.environ['VLLM_RPC_BASE_PATH'], str(uuid.uuid4()))\n"
    "socket.socket(socket.AF_UNIX).bind(path)\n"
    "print(path, flush=True)",
)


@pytest.mark.parametrize("is_long", [False, True])
async def test_stop_removes_the_sockets_of_a_killed_server(is_long, tmp_path, monkeypatch):
    if is_long:  # too long for the path of a socket
        os.mkdir(folder := f"{tmp_path}/{60 * 't'}")
        monkeypatch.setattr("tempfile.tempdir", folder)
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    server = await Server.start(spec(SERVE_WITH_SOCKET))
    path = Path(server.tail())
    assert stat.S_ISSOCK(os.stat(path).st_mode) and path.parent.name.startswith("polyturn-")
    signal_session(server.pid, signal.SIGKILL)
    await server.stop()
    assert not os.access(path.parent, os.F_OK)


async def test_server_that_ignores_sigterm_is_killed():
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVE
    server = await Server.start(spec(code, stop_timeout_s=0.5))
    await server.stop()
    assert session_of(server.pid) == []


async def test_named_log_is_kept(tmp_path):
    server = await Server.start(spec(log=tmp_path / "logs" / "server.log"))
    await server.stop()
    assert (tmp_path / "logs" / "server.log").read_text() == "serving\n"


CHILD_WITH_MEMORY = """
import time
from multiprocessing.shared_memory import SharedMemory
block = SharedMemory(create=True, size=7000)
print(block.name, flush=True)
time.sleep(600)
"""
MEMORY = f"""
import multiprocessing
from multiprocessing.shared_memory import SharedMemory
block = SharedMemory(create=True, size=5000)
lock = multiprocessing.get_context("spawn").Lock()
child = subprocess.Popen([sys.executable, "-c", {CHILD_WITH_MEMORY!r}], stdout=subprocess.PIPE, text=True)
print(block.name, child.stdout.readline().strip(), lock._semlock.name.replace("/", "sem."), flush=True)
"""
SERVE_WITH_MEMORY = SERVE.replace('print("serving", flush=True)', MEMORY)
SHM = Path("/dev/shm")


def there(*names: str) -> list[bool]:
    return [(SHM / name).exists() for name in names]


@pytest.fixture
def block_of():
    """Return a function that makes shared memory of this process, removed at the end."""
    blocks = []

    def make() -> SharedMemory:
        blocks.append(SharedMemory(create=True, size=100))
        return blocks[-1]

    yield make
    for block in blocks:
        block.close()
        block.unlink()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows shared memory as files")
async def test_stop_removes_shared_memory_of_a_killed_server_alone(block_of, caplog):
    caplog.set_level(logging.INFO, logger="polyturn.engines.launcher")
    before = block_of()
    server = await Server.start(spec(SERVE_WITH_MEMORY))
    during, unheld = block_of(), block_of()
    unheld.close()
    names = server.tail().split()
    in_use = (SHM / names[0]).open("rb")
    signal_session(server.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while session_of(server.pid) and time.monotonic() < deadline:  # noqa: ASYNC110 (processes end by themselves)
        await asyncio.sleep(0.02)
    assert there(*names) == [True, True, True]  # leftovers of a kill: of the server, of its child, and a semaphore
    await server.stop()
    assert there(*names) == [True, False, False]
    assert there(before.name, during.name, unheld.name) == [True, True, True]
    in_use.close()
    await server.stop()
    assert there(*names) == [False, False, False]
    assert str(server.pid) in caplog.messages[-1]
    assert names[0] in caplog.messages[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_server_ends_when_its_starter_is_killed(tmp_path):
    starter = tmp_path / "starter.py"
    starter.write_text(
        "import asyncio, sys, time\n"
        "from polyturn.engines.launcher import LaunchSpec, Server\n"
        f"code = {ALONE!r}\n"
        "spec = LaunchSpec(command=(sys.executable, '-c', code, '{port}'))\n"
        "print(asyncio.run(Server.start(spec)).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, str(starter)], stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        assert pid in session_of(pid)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 120
    while session_of(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = session_of(pid)
    for member in left:
        os.kill(member, signal.SIGKILL)
    assert left == []
