"""ManagedProcess: a child process in a session of its own. It offers the last lines of the child's log, and ending it also
ends all processes that the child started.

    process = ManagedProcess(["python", "server.py"], log=Path("server.log"))
    process.is_alive, process.tail()
    process.end(grace_s=5)               SIGTERM, then SIGKILL; both also to every process that the child started

If the kernel supports it, the child ends when this process dies, however it dies. The kernel ties this to the
thread that started the child, so one thread, which never ends, starts all children.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from polyturn.infra.aio import in_background

POLL_S = 0.05
_KILLED_S = 5.0
"""Seconds to wait for killed processes to disappear."""
_TAIL_BYTES = 1 << 16
_DIE_WITH_PARENT = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, int(sys.argv[1]))\n"  # PR_SET_PDEATHSIG; it survives the exec
    "if os.getppid() != int(sys.argv[2]): sys.exit('the process that started this one is gone')\n"
    "os.execvp(sys.argv[3], sys.argv[3:])\n"
)


class ManagedProcess:
    """One child process. Its output goes to a log, unless `pipes` is set."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        pipes: bool = False,
        pass_fds: Sequence[int] = (),
        log: Path | Literal["inherited", "none"] | None = None,
    ) -> None:
        """Start the process.

        Args:
            command: The program and its arguments.
            env: The complete environment; None inherits the environment of this process.
            pipes: Whether `stdin` and `stdout` are pipes to the process. If not, its input is empty and its output is
                logged.
            pass_fds: Descriptors that it inherits.
            log: A file to append the output to, "inherited" for the output of this process, or "none"; None uses a
                temporary file, which `close` removes.

        Raises:
            OSError: the process cannot be started.
        """
        environ = dict(os.environ if env is None else env)
        started = dies_with_parent(command, env=environ)
        self._log: IO[bytes] | None = None
        if not isinstance(log, str):
            self._log = tempfile.TemporaryFile() if log is None else log.open("a+b")  # noqa: SIM115
        written: Any = self._log or (None if log == "inherited" else subprocess.DEVNULL)
        self._is_over = False
        self._process: subprocess.Popen[bytes] = _in_lasting_thread(
            lambda: subprocess.Popen(
                started,
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else written,
                stderr=written,
                env=environ,
                pass_fds=tuple(pass_fds),
                start_new_session=True,
            )
        )
        self.pid = self._process.pid
        self.stdin, self.stdout = self._process.stdin, self._process.stdout

    @property
    def is_alive(self) -> bool:
        """Whether the process itself runs; its children may outlive it."""
        return self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """The exit status; the negative number of the signal if a signal killed it; None while it runs."""
        return self._process.poll()

    def tail(self, lines: int = 20) -> str:
        """Return the last lines of the log."""
        if self._log is None or self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        data = os.pread(self._log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        return "\n".join(data.decode("utf-8", "replace").splitlines()[-lines:]).rstrip()

    def members(self) -> list[int]:
        """Return the live processes of its session."""
        self._process.poll()  # reaps the main process, which would stay in the list as a zombie
        return session_of(self.pid)

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds; return whether the process has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return not self.is_alive

    def end(self, *, grace_s: float = 0.0, asks: bool = True) -> None:
        """End the process and every process of its session; a second call does nothing.

        Args:
            grace_s: Seconds that it may take to end by itself, after its input is closed and SIGTERM is sent; 0 kills at
                once.
            asks: Whether to send SIGTERM; if not, only its input is closed.
        """
        if self._is_over:
            return  # its id may belong to another process by now
        self._is_over = True
        with contextlib.suppress(OSError):
            if self.stdin is not None:
                self.stdin.close()
        if grace_s:
            if asks:
                signal_session(self.pid, signal.SIGTERM)
            self._await_end(grace_s)
        signal_session(self.pid, signal.SIGKILL)
        self._process.wait()
        self._await_end(_KILLED_S)
        if self.stdout is not None:
            self.stdout.close()

    def close(self) -> None:
        """Close the log; call this after the process has ended."""
        if self._log is not None:
            self._log.close()

    def _await_end(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.members() and time.monotonic() < deadline:
            time.sleep(POLL_S)


async def end_async(process: asyncio.subprocess.Process, *, grace_s: float) -> bool:
    """End an asyncio process and all processes of its session; return whether the process itself has ended.

    This waits only for the process to exit; `process.wait` would also wait for children that hold its pipes.

    Args:
        process: Started with `start_new_session`.
        grace_s: Seconds that it may take after its input is closed, and again after SIGTERM.
    """
    if process.stdin is not None:
        process.stdin.close()
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            signal_session(process.pid, number)
        deadline = time.monotonic() + grace_s
        while process.returncode is None and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        if process.returncode is not None:
            break
    signal_session(process.pid, signal.SIGKILL)  # children that outlived it
    return process.returncode is not None


def dies_with_parent(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    number: signal.Signals = signal.SIGTERM,
) -> list[str]:
    """Wrap a command so that it gets a signal when the thread that started it ends, if the kernel supports that.

    Args:
        command: The program and its arguments.
        env: The environment whose PATH is searched for the program; None takes the environment of this process.
        cwd: The working folder of the program.
        number: SIGTERM lets a server end its own processes; SIGKILL ends a program that may ignore that.

    Raises:
        OSError: the program does not exist in that environment and folder.
    """
    program = os.path.join(cwd or "", command[0]) if os.sep in command[0] else command[0]
    if shutil.which(program, path=(os.environ if env is None else env).get("PATH")) is None:
        code = errno.EACCES if os.path.exists(program) else errno.ENOENT
        raise OSError(code, os.strerror(code), command[0])
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(int(number)), str(os.getpid()), *command]


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port of the address `host` of this machine; "" is every address."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def is_readable(fd: int, *, timeout_s: float) -> bool:
    """Wait up to `timeout_s` seconds; return whether data or the end of the stream can be read. Negative means no wait.

    `select.select` refuses descriptors above 1023, which a run with hundreds of live sandboxes or servers reaches.
    """
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(math.ceil(max(0.0, timeout_s) * 1000)))


def session_of(pid: int) -> list[int]:
    """Return the live processes of the session that `pid` leads; just `pid` on systems without /proc."""
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return []
        return [pid]
    return [member for member, session, state in _processes() if session == pid and state != "Z"]


def signal_session(pid: int, number: signal.Signals) -> None:
    """Send a signal to every process of the session that `pid` leads, the youngest first."""
    for member in sorted(session_of(pid), reverse=True):  # a process that watches its parent is signalled before it
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(member, number)


def _processes() -> list[tuple[int, int, str]]:
    """Return (process id, session id, state) of every process that /proc lists."""
    processes = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        fields = stat.rpartition(")")[2].split()  # the name, in brackets, may contain spaces and brackets
        processes.append((int(entry.name), int(fields[3]), fields[0]))
    return processes


def _in_lasting_thread(start: Callable[[], Any]) -> Any:
    """Call `start` in the one thread that starts processes, and return its result; a forked process gets its own thread."""

    async def call() -> Any:
        return start()

    return in_background(call(), thread=f"polyturn-starter-{os.getpid()}")
