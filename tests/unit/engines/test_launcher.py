"""A server is started, waited for and stopped, and nothing of it stays behind. Real processes, a real HTTP server."""

import logging
import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import aiohttp
import pytest

from polyturn.core.errors import EngineError
from polyturn.engines.launcher import LaunchSpec, Server
from polyturn.infra.process import signal_session

SERVE = """
import http.server, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"ok")
    def log_message(self, *a): pass
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("serving", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def spec(code: str = SERVE, **options) -> LaunchSpec:
    return LaunchSpec(
        command=(sys.executable, "-c", code, "{port}"), **{"ready_timeout_s": 120, "stop_timeout_s": 2} | options
    )


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_server_answers_once_started_and_nothing_of_it_is_left_once_stopped():
    server = await Server.start(spec())
    async with aiohttp.ClientSession() as session, session.get(server.url + "/health") as reply:
        assert await reply.text() == "ok"
    assert server.tail() == "serving"
    members = server._process.members()
    assert len(members) == 2  # the server, and the process that it started
    await server.stop()
    assert not any(map(is_running, members))
    assert not server.log.exists()
    await server.stop()


async def test_a_server_that_ends_early_shows_its_last_lines():
    code = "import sys; print('no such model: x'); sys.exit(3)"
    with pytest.raises(EngineError, match=r"ended with status 3 .*\n.*no such model: x"):
        await Server.start(spec(code))


async def test_a_server_that_is_never_ready_is_stopped_and_named():
    with pytest.raises(EngineError, match=r"was not ready after 1 s; raise engine\.launch\.ready_timeout_s"):
        await Server.start(spec("import time; print('thinking', flush=True); time.sleep(600)", ready_timeout_s=1))


async def test_a_program_that_does_not_exist_is_named():
    missing = LaunchSpec(command=("/no/such/python", "-m", "x"), ready_timeout_s=10)
    with pytest.raises(EngineError, match="/no/such/python"):
        await Server.start(missing)


async def test_a_server_that_ignores_the_polite_signal_is_killed():
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVE
    server = await Server.start(spec(code, stop_timeout_s=0.5))
    members = server._process.members()
    await server.stop()
    assert not any(map(is_running, members))


async def test_the_log_is_kept_where_one_is_named(tmp_path):
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
async def test_shared_memory_of_a_killed_server_is_removed_and_that_of_others_stays(block_of, caplog):
    caplog.set_level(logging.INFO, logger="polyturn.engines.launcher")
    before = block_of()
    server = await Server.start(spec(SERVE_WITH_MEMORY))
    during, unheld = block_of(), block_of()
    unheld.close()
    names = server.tail().split()
    in_use = (SHM / names[0]).open("rb")
    signal_session(server.pid, signal.SIGKILL)
    server._process._await_end(60)
    assert there(*names) == [True, True, True]  # what a kill leaves behind: of the server, of its child, and a semaphore
    await server.stop()
    assert there(*names) == [True, False, False]
    assert there(before.name, during.name, unheld.name) == [True, True, True]
    in_use.close()
    await server.stop()
    assert there(*names) == [False, False, False]
    assert caplog.messages[-1] == f"removed the shared memory that the server {server.pid} left behind: {names[0]}"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_a_server_ends_when_the_process_that_started_it_is_killed(tmp_path):
    starter = tmp_path / "starter.py"
    starter.write_text(
        "import asyncio, sys, time\n"
        "from polyturn.engines.launcher import LaunchSpec, Server\n"
        f"code = {SERVE!r}\n"
        "spec = LaunchSpec(command=(sys.executable, '-c', code, '{port}'))\n"
        "print(asyncio.run(Server.start(spec)).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, str(starter)], stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        assert is_running(pid)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 120
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)
