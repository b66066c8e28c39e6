"""Interpreter: the handle of one sandbox. It starts the sandbox, runs pieces of code in it, and kills all its processes.

All calls block and are meant for threads: one thread calls `run`, any thread may call `stop`. This class limits the amount
of output, the run time and the size of an answer, and ignores answers that do not belong to the request.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import fcntl
import functools
import itertools
import json
import os
import resource
import secrets
import selectors
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from polyturn.core.errors import PolyturnError
from polyturn.infra.process import is_readable
from polyturn.sandbox.python.cgroup import ControlGroup, make_group
from polyturn.sandbox.python.isolation import ENVIRONMENT, Isolation, bwrap
from polyturn.sandbox.python.limits import RunResult, SandboxLimits
from polyturn.sandbox.python.seccomp import filter_program
from polyturn.sandbox.python.standstill import go_on, stand_still

START_S = 20.0
"""Seconds that a sandbox may take to start on a busy machine."""
GRACE_S = 0.5
"""Seconds that code may take to end after its time limit, before its sandbox is killed."""
MAX_FETCHED_BYTES = 16 << 20
"""Maximum total size in bytes of the files that a program returns; files beyond it are left out."""
MAX_WORDS_BYTES = 64 << 10
"""Maximum number of bytes that the code itself may write on the answer channel before the answer."""
MAX_LINE_BYTES = 512
"""Maximum size in bytes of an answer's line, without the sizes of the requested files."""
MAX_FILE_BYTES_OF_LINE = 16
"""Maximum number of bytes that each requested file adds to the line."""
LEAST_MEMORY_MB = 64
"""Minimum memory limit in MB: the memory of the interpreter itself, and a little more."""
_ENTER = 'for door in $POLYTURN_DOORS; do echo $$ > "$door" || exit 125; done; exec "$@"'
_COUNT = itertools.count()


class SandboxStartError(PolyturnError, RuntimeError):
    """A sandbox did not start; the message has its output."""


class Interpreter:
    """A Python interpreter in a sandbox."""

    def __init__(self, limits: SandboxLimits, *, isolation: Isolation, python: str) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._is_closed = False
        self._init_fd: int | None = None
        self._init_pid: int | None = None
        self._folder: str | None = None
        self._marker = f"{os.getpid()}-{next(_COUNT)}-{secrets.token_hex(4)}"
        room = limits.memory_mb + 64  # so that a single process reaches its own limit first and gets a MemoryError
        self._group: ControlGroup | None = make_group(
            f"polyturn-sandbox-{self._marker}", memory_mb=room, processes=limits.processes + 4
        )
        try:
            self._start(isolation, python)
            self._await_ready()
        except BaseException:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the sandbox can still run code."""
        return not self._is_closed and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The id of the process that holds the sandbox."""
        return self._process.pid

    @property
    def _first_pid(self) -> int:
        """The id of the ancestor of all processes in the sandbox."""
        return self._process.pid if self._init_pid is None else self._init_pid

    def _start(self, isolation: Isolation, python: str) -> None:
        inside_requests, self._requests = os.pipe()
        self._replies, inside_replies = os.pipe()
        inside = [inside_requests, inside_replies]
        info_read: int | None = None
        command: list[str] = []
        uid = 0x60000000 + secrets.randbelow(0x10000000) if isolation is Isolation.ROOT else None
        cwd = "/tmp"
        if isolation is Isolation.NONE:
            cwd = self._folder = tempfile.mkdtemp(prefix="polyturn-sandbox-")
        else:
            info_read, info_write = os.pipe()
            inside.append(info_write)
            filter_fd = _filter_file()
            if filter_fd is not None:
                inside.append(filter_fd)
            command = [*bwrap(isolation, self._limits, python=python, filter_fd=filter_fd), "--info-fd", str(info_write)]
        config = {
            "uid": uid,
            "cwd": cwd,
            "requests": inside_requests,
            "replies": inside_replies,
            "rlimits": self._limits.of_a_process,
        }
        command += [python, "-I", "-S", "-B", "-X", "utf8", "-c", _worker(), json.dumps(config)]
        if self._group is not None:
            command = ["/bin/sh", "-c", _ENTER, "sh", *command]
        doors = "" if self._group is None else " ".join(self._group.doors)
        environment = ENVIRONMENT | {"POLYTURN_DOORS": doors, "POLYTURN_SANDBOX": self._marker}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=inside,
                env=environment,
                start_new_session=True,
            )
        except OSError as problem:
            for fd in (*inside, *([] if info_read is None else [info_read])):
                os.close(fd)
            raise SandboxStartError(f"the sandbox did not start: {problem}") from problem
        for fd in inside:
            os.close(fd)
        assert self._process.stdout is not None and self._process.stderr is not None
        self._stdout, self._stderr = self._process.stdout.fileno(), self._process.stderr.fileno()
        self._exit = os.pidfd_open(self._process.pid)
        for fd in (self._stdout, self._stderr, self._requests, self._replies):
            os.set_blocking(fd, False)
        if info_read is not None:
            self._watch_init(info_read, confines=isolation is Isolation.USER)

    def _watch_init(self, info: int, *, confines: bool) -> None:
        """Get a handle of the first process in the sandbox's process namespace; when it ends, the kernel kills all others.

        If this process runs as the same user as the code (`confines`), the code can write into its memory, so it gets the
        same limits as the code.
        """
        with open(info, "rb"):
            output = b""
            until = time.monotonic() + START_S
            while b"}" not in output and is_readable(info, timeout_s=until - time.monotonic()):
                chunk = os.read(info, 4096)
                if not chunk:
                    break
                output += chunk
        with contextlib.suppress(ValueError, KeyError, OSError):
            pid = json.loads(output)["child-pid"]
            self._init_fd = os.pidfd_open(pid)
            self._init_pid = pid
        if confines and self._init_fd is not None:
            try:
                for kind, value in self._limits.of_a_process:
                    hard = resource.prlimit(pid, kind)[1]
                    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
                    resource.prlimit(pid, kind, (value, value))
            except OSError as problem:
                if self.is_alive:
                    raise SandboxStartError(f"the sandbox's first process cannot be limited: {problem}") from problem

    def _await_ready(self) -> None:
        result = self._converse(b"", token="ready", timeout_s=START_S, grace_s=0.0)
        if result.status != "ready":
            raise SandboxStartError(f"the sandbox did not start ({result.status}): {result.stderr.strip()[-300:]}")

    def run(self, code: str, *, timeout_s: float | None = None) -> RunResult:
        """Run a piece of code, with the variables of the earlier pieces."""
        return self._ask({"code": code, "is_program": False, "fetch": []}, timeout_s)

    def run_program(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        fetch: Sequence[str] = (),
        timeout_s: float | None = None,
        memory_mb: float | None = None,
    ) -> RunResult:
        """Run code as a script, with `stdin` and with `files` (in base64) in its folder.

        The result has the files named in `fetch` that exist, up to `MAX_FETCHED_BYTES` in total. `memory_mb` permanently
        lowers the sandbox's memory limit, to at least `LEAST_MEMORY_MB`.
        """
        request = {"code": code, "is_program": True, "stdin": stdin, "files": dict(files or {}), "fetch": list(fetch)}
        if memory_mb is not None:
            request["memory_bytes"] = int(min(max(memory_mb, LEAST_MEMORY_MB), self._limits.memory_mb)) << 20
        return self._ask(request, timeout_s)

    def _ask(self, request: dict[str, Any], timeout_s: float | None) -> RunResult:
        limit = self._limits.timeout_s if timeout_s is None else min(timeout_s, self._limits.timeout_s)
        token = secrets.token_hex(16)
        request = request | {"id": token, "timeout_s": limit, "max_fetched": MAX_FETCHED_BYTES}
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            if not self.is_alive:
                return RunResult(status="killed", is_alive=False)
            go_on(self._first_pid)
            result = self._converse(line, token=token, timeout_s=limit, grace_s=GRACE_S, fetch=request["fetch"])
            if result.is_alive and not stand_still(self._first_pid):
                result = dataclasses.replace(result, is_alive=False)
        if not result.is_alive:
            self.close()
        return result

    def _converse(
        self, line: bytes, *, token: str, timeout_s: float, grace_s: float, fetch: Sequence[str] = ()
    ) -> RunResult:
        start = time.monotonic()
        printed = {self._stdout: _Printed(self._limits), self._stderr: _Printed(self._limits)}
        reply, to_send, ended = _Reply(token, fetch), memoryview(line), ""
        with selectors.DefaultSelector() as selector:
            for fd in (*printed, self._replies, self._exit):
                selector.register(fd, selectors.EVENT_READ)
            if to_send:
                selector.register(self._requests, selectors.EVENT_WRITE)
            while not reply.is_whole and not ended:
                left = start + timeout_s + grace_s - time.monotonic()
                if left <= 0:
                    ended = "timeout"
                    break
                ready = {key.fd for key, _ in selector.select(left)}
                if self._requests in ready:
                    with contextlib.suppress(BrokenPipeError):
                        to_send = to_send[os.write(self._requests, to_send) :]
                    if not to_send:
                        selector.unregister(self._requests)
                for fd in ready & set(printed):
                    if not printed[fd].read(fd):
                        selector.unregister(fd)
                    if printed[fd].num_bytes > self._limits.flood_bytes:
                        ended = "output"
                if self._replies in ready:
                    chunk = _read(self._replies)
                    reply.add(chunk or b"")
                    if chunk == b"":
                        selector.unregister(self._replies)
                    if reply.is_flood:
                        ended = "output"
                if not reply.is_whole and self._exit in ready:
                    ended = "killed"
        for fd, output in printed.items():  # output from before the answer is already in the pipe
            output.drain(fd)
        return self._result(reply, ended, printed, duration_s=time.monotonic() - start)

    def _result(self, reply: _Reply, ended: str, printed: dict[int, _Printed], *, duration_s: float) -> RunResult:
        status, code = reply.status, reply.exit_code
        if not reply.is_whole:
            status, code = ended, None
            if ended == "killed":
                code = self._process.wait()
                status, code = ("killed", 128 - code if code > 128 else code) if code >= 128 or code < 0 else ("exit", code)
        out, err = printed[self._stdout], printed[self._stderr]
        return RunResult(
            status=status,
            stdout=out.text,
            stderr=err.text,
            exit_code=code,
            duration_s=duration_s,
            is_truncated=out.is_truncated or err.is_truncated,
            is_alive=reply.is_whole,
            files=reply.files,
        )

    def stop(self) -> None:
        """Kill the sandbox now; `close` also releases its resources in this process."""
        with contextlib.suppress(OSError):
            if self._init_fd is not None:
                signal.pidfd_send_signal(self._init_fd, signal.SIGKILL)
                return  # bubblewrap, outside of the sandbox, reaps it and ends
        self._kill_group()

    def _kill_group(self) -> None:
        if not self._is_closed and self._process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the sandbox with all its processes, wait for its end, and release its resources."""
        if "_process" not in self.__dict__:
            self._give_back(())
            return
        self.stop()
        with self._lock:
            if self._is_closed:
                return
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._kill_group()
                self._process.wait()
            if self._init_fd is not None:
                is_readable(self._init_fd, timeout_s=10.0)
            self._is_closed = True
            self._give_back((self._exit, *([] if self._init_fd is None else [self._init_fd])))
            self._init_fd = None

    def _give_back(self, fds: Sequence[int]) -> None:
        for fd in (*fds, *(self.__dict__[n] for n in ("_requests", "_replies") if n in self.__dict__)):
            with contextlib.suppress(OSError):
                os.close(fd)
        if "_process" in self.__dict__:
            for stream in (self._process.stdout, self._process.stderr):
                if stream is not None:
                    stream.close()
        if self._group is not None:
            self._group.remove()
        if self._folder is not None:
            _kill_marked(self._marker)
            shutil.rmtree(self._folder, ignore_errors=True)


@functools.cache
def _worker() -> str:
    """Read the worker's source once, so that an upgrade of the package during a long run does not mix two versions."""
    return resources.files("polyturn.sandbox.python").joinpath("worker.py").read_text()


class _Printed:
    """The output of one stream: keeps the first bytes, and counts all."""

    def __init__(self, limits: SandboxLimits) -> None:
        self._kept = bytearray()
        self._limits = limits
        self.num_bytes = 0

    def read(self, fd: int) -> bool:
        """Read once; False at the end of the stream."""
        chunk = _read(fd)
        if chunk is None:
            return True
        self.num_bytes += len(chunk)
        self._kept += chunk[: max(0, self._limits.output_bytes - len(self._kept))]
        return bool(chunk)

    def drain(self, fd: int) -> None:
        """Read the available bytes, without waiting for a process that keeps writing."""
        for _ in range(64):
            before = self.num_bytes
            if not self.read(fd) or self.num_bytes == before:
                return

    @property
    def is_truncated(self) -> bool:
        return self.num_bytes > len(self._kept)

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace")


def _read(fd: int) -> bytes | None:
    """Read the available bytes; return b"" at the end of the stream, and None if there are none yet."""
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return None


class _Reply:
    """The answer to one request: a short line, then the raw bytes of the requested files.

    The code itself can write on this channel. So the size of an answer is limited by the request, only a short line is
    parsed, and lines without the request's id are ignored.
    """

    def __init__(self, token: str, fetch: Sequence[str]) -> None:
        self.status = "error"
        self.exit_code: int | None = None
        self._token = token
        self._fetch = fetch
        self._max_line = MAX_LINE_BYTES + MAX_FILE_BYTES_OF_LINE * len(fetch)
        self._received = bytearray()
        self._num_words = 0
        """Number of bytes received before the answer's files."""
        self._sizes: list[int | None] | None = None
        """Size of each file in bytes, None for a missing file; None until the line has arrived."""

    def add(self, chunk: bytes) -> None:
        """Add received bytes."""
        self._received += chunk
        if self._sizes is None:
            self._num_words += len(chunk)
        while self._sizes is None and (end := self._received.find(b"\n")) >= 0:
            line = bytes(self._received[: min(end, self._max_line + 1)])
            del self._received[: end + 1]
            self._read(line)

    @property
    def is_flood(self) -> bool:
        """Whether more bytes arrived than any valid answer has."""
        return self._sizes is None and self._num_words > MAX_WORDS_BYTES + self._max_line

    @property
    def is_whole(self) -> bool:
        """Whether the answer and its files have arrived."""
        return self._sizes is not None and len(self._received) >= sum(size or 0 for size in self._sizes)

    @property
    def files(self) -> dict[str, str]:
        """File name -> content in base64, for the files that exist."""
        files, at = {}, 0
        for name, size in zip(self._fetch, self._sizes or (), strict=False):
            if size is not None:
                files[name] = base64.b64encode(self._received[at : at + size]).decode()
                at += size
        return files

    def _read(self, line: bytes) -> None:
        if len(line) > self._max_line or self._token.encode() not in line:
            return
        try:
            read = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(read, dict) or read.get("id") != self._token:
            return
        status, code, sizes = read.get("status"), read.get("exit_code"), read.get("sizes")
        self.status = status if status in ("ready", "ok", "error", "exit", "timeout") else "error"
        self.exit_code = code if type(code) is int and 0 <= code <= 255 else None
        known: list[Any] = sizes if isinstance(sizes, list) and len(sizes) == len(self._fetch) else []
        are_sizes = all(size is None or (type(size) is int and size >= 0) for size in known)
        self._sizes = known if are_sizes and sum(size or 0 for size in known) <= MAX_FETCHED_BYTES else []


def _filter_file() -> int | None:
    program = filter_program()
    if program is None:
        return None
    fd = os.memfd_create("filter")
    os.write(fd, program)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_SETFD, 0)
    return fd


def _kill_marked(marker: str) -> None:
    """Kill the remaining processes of a sandbox without isolation; a variable in their environment identifies them."""
    wanted = f"POLYTURN_SANDBOX={marker}".encode()
    for _ in range(3):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                    if wanted in file.read().split(b"\0"):
                        os.kill(int(name), signal.SIGKILL)
