"""Starting an inference server, waiting until it answers, and stopping exactly what was started.

    server = await Server.start(LaunchSpec(command=("python", "-m", "some.server", "--port", "{port}")))
    server.url                    http://127.0.0.1:41873
    await server.stop()

A server gets a session of its own, so that stopping it reaches every process that it started and nothing else. Where the
kernel offers it, the server is told to end when this process dies, however it dies. Shared memory that its processes leave
behind, as they do when they are killed, is removed. A server that does not come up fails with the last lines of its log,
which is where the reason is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polyturn.core.errors import EngineError, one_line
from polyturn.engines.shared_memory import SessionMemory

logger = logging.getLogger(__name__)

_TAIL_LINES = 20
_KILLED_S = 5.0
"""How long the system may take to end processes that were killed."""
_DIE_WITH_PARENT = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"  # PR_SET_PDEATHSIG; it survives the exec
    "if os.getppid() != int(sys.argv[1]): sys.exit('the process that started this server is gone')\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """How a server is started."""

    command: tuple[str, ...]
    """The program and its arguments; `{port}` stands for the port that was found free."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's environment."""
    health: str = "/health"
    """The path that answers 200 once the server is ready."""
    ready_timeout_s: float = 300.0
    stop_timeout_s: float = 20.0
    """How long the server may take to end by itself before it is killed."""
    log: Path | None = None
    """Where its output goes; a temporary file, removed when it stops, if None."""


class Server:
    """A server that this process started."""

    def __init__(
        self, spec: LaunchSpec, process: subprocess.Popen[bytes], *, port: int, log: Path, memory: SessionMemory
    ) -> None:
        self.spec = spec
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._process = process
        self._memory = memory

    @classmethod
    async def start(cls, spec: LaunchSpec) -> Server:
        """Start a server and return once it is ready. Call it from a thread that outlives the server, such as the main one:
        the server ends with the thread that started it.

        Raises:
            EngineError: it cannot be started, ended early, or was not ready in time; the message ends with its last lines.
        """
        port = free_port()
        log = spec.log
        if log is None:
            handle, name = tempfile.mkstemp(prefix="polyturn-server-", suffix=".log")
            os.close(handle)
            log = Path(name)
        command = [part.replace("{port}", str(port)) for part in spec.command]
        command = dies_with_parent(command)
        memory = SessionMemory()
        try:
            process = _spawn(command, env=spec.env, log=log)
        except OSError as problem:
            raise EngineError(f"the server {spec.command[0]!r} cannot be started ({one_line(problem)})") from problem
        server = cls(spec, process, port=port, log=log, memory=memory)
        try:
            await server._wait_until_ready()
        except BaseException:
            await server.stop()
            raise
        return server

    @property
    def pid(self) -> int:
        """The process id of the server, which is also its session's."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the server's main process runs."""
        return self._process.poll() is None

    def tail(self, lines: int = _TAIL_LINES) -> str:
        """Return the last lines of the server's log."""
        try:
            with self.log.open(encoding="utf-8", errors="replace") as file:
                return "".join(deque(file, maxlen=lines)).rstrip()
        except OSError:
            return ""

    def look_at_memory(self) -> None:
        """Note what shared memory its processes hold, to be removed should they leave it behind. For while it is healthy."""
        self._memory.look(self._members())

    async def stop(self) -> None:
        """End the server and every process of its session; kill what has not ended in time. Stopping twice is fine."""
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """Do the same and wait for it here: for a process that is ending and can start no thread."""
        self.look_at_memory()
        self._signal(signal.SIGTERM)
        self._wait_for_end(self.spec.stop_timeout_s)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._wait_for_end(_KILLED_S)
        if removed := self._memory.remove_unheld():
            logger.info("removed the shared memory that the server %d left behind: %s", self.pid, ", ".join(removed))
        if self.spec.log is None:
            self.log.unlink(missing_ok=True)

    def _wait_for_end(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._members() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _signal(self, number: signal.Signals) -> None:
        self._process.poll()  # reaps the main process, which would stay in the list as a zombie
        signal_session(self.pid, number)

    def _members(self) -> list[int]:
        self._process.poll()
        return session_of(self.pid)

    async def _wait_until_ready(self) -> None:
        import aiohttp

        deadline = time.monotonic() + self.spec.ready_timeout_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while time.monotonic() < deadline:
                if not self.is_alive:
                    raise EngineError(
                        f"the server {self.spec.command[0]!r} ended with status {self._process.returncode} before it was "
                        f"ready; its last lines:\n{self.tail()}"
                    )
                self.look_at_memory()
                with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
                    async with session.get(self.url + self.spec.health, allow_redirects=False) as reply:
                        if reply.status == 200:
                            self.look_at_memory()
                            return
                await asyncio.sleep(0.2)
        raise EngineError(
            f"the server {self.spec.command[0]!r} was not ready after {self.spec.ready_timeout_s:.0f} s; raise "
            f"engine.launch.ready_timeout_s, or see its last lines:\n{self.tail()}"
        )


def dies_with_parent(command: Sequence[str]) -> list[str]:
    """Return a command that does the same and is told to end when the thread that starts it does, where the kernel can."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]


def _spawn(command: list[str], *, env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            start_new_session=True,
        )


def free_port() -> int:
    """Return a port that nothing listens on at 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def session_of(pid: int) -> list[int]:
    """Return the live processes of the session that `pid` leads; only `pid` where the system does not list them."""
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return []
        return [pid]
    return [member for member, session, state in _processes() if session == pid and state != "Z"]


def signal_session(pid: int, number: signal.Signals) -> None:
    """Send a signal to every process of the session that `pid` leads, and to nothing else."""
    for member in session_of(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, number)


def _processes() -> list[tuple[int, int, str]]:
    """Return (process id, session id, state) of every process that /proc lists."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        fields = stat.rpartition(")")[2].split()  # the name, in brackets, may hold blanks and brackets itself
        found.append((int(entry.name), int(fields[3]), fields[0]))
    return found
