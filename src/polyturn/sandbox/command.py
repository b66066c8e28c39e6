"""Runs a program of this machine to its end, with a deadline, input, and bounded output.

    run_bounded(["podman", "ps"], timeout_s=30)  ->  ProgramEnd(exit_code=0, stdout=b"…", stderr=b"", …)

`run_bounded` blocks, so callers use a thread. It waits only for the program itself, and not for children that still hold its
pipes open; asyncio always waits for both. The end of the program ends its children, too, unless `keeps_children` is set,
for children that end with the sandbox: a server that a command starts in it, or the monitor of a container.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

CHUNK = 1 << 16
DRAIN_S = 0.2
"""Seconds to keep reading output after the program has ended; an orphaned child may hold the pipes forever."""
LOOK_S = 0.05
"""Seconds between two checks whether the program has ended, on systems without pidfd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnd:
    """The result of a program."""

    exit_code: int
    """Exit status; minus the signal's number if the program was killed."""
    stdout: bytes
    stderr: bytes
    is_late: bool = False
    """Whether the program was killed at its deadline."""
    is_truncated: bool = False
    """Whether the middle of the output is left out."""


def last_lines(output: ProgramEnd) -> str:
    """Return the last lines of a program's output: stderr if there is any, else stdout."""
    text = (output.stderr.strip() or output.stdout.strip()).decode("utf-8", "replace")
    return " | ".join(text.splitlines()[-3:])[-500:] or f"exit code {output.exit_code}"


class Sweeper(NamedTuple):
    """A process that removes the sandboxes of this process after this process has ended."""

    mark: str
    """The mark of these sandboxes."""
    process: subprocess.Popen[bytes]
    """Kept, so that its standard input stays open until this process ends: the end of the input starts the removal."""


@functools.cache
def sweep_at_end(pid: int, script: str, *arguments: str) -> Sweeper:
    """Run a shell script with a new mark and `arguments` after this process, `pid`, has ended, for whatever reason.

    The script runs three times within 12 seconds, because a sandbox may still be starting when this process ends.
    """
    mark, nothing = f"polyturn-{pid}-{uuid.uuid4().hex[:12]}", subprocess.DEVNULL
    process = subprocess.Popen(
        ["sh", "-c", f"cat > /dev/null\nfor pause in 0 2 10; do sleep $pause; {script}\ndone", "sh", mark, *arguments],
        stdin=subprocess.PIPE,
        stdout=nothing,
        stderr=nothing,
        start_new_session=True,
    )
    return Sweeper(mark, process)


class StoppedError(Exception):
    """The caller stopped the program."""


class Stopper:
    """Stops a program from another thread, even before the program has started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.is_set = False

    def watch(self, process: subprocess.Popen[bytes] | None) -> None:
        """Set the program to stop, or None once it has ended; kill it now if `set` was called before."""
        with self._lock:
            self._process = process
            if self.is_set and process is not None:
                _kill(process)

    def set(self) -> None:
        """Kill the program now, or as soon as it starts."""
        with self._lock:
            self.is_set = True
            if self._process is not None:
                _kill(self._process)


class Bounded:
    """The first and the last bytes of a stream."""

    def __init__(self, max_bytes: int) -> None:
        self._half = max(1, max_bytes // 2)
        self._head, self._tail = bytearray(), bytearray()
        self.num_left_out = 0

    def add(self, data: bytes) -> None:
        """Add data, keeping only the first and last bytes of the stream."""
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        if (excess := len(self._tail) - self._half) > 0:
            del self._tail[:excess]
            self.num_left_out += excess

    def value(self) -> bytes:
        """Return the kept bytes, with a line in place of the bytes left out."""
        gap = b"\n[... %d bytes left out ...]\n" % self.num_left_out if self.num_left_out else b""
        return bytes(self._head) + gap + bytes(self._tail)


def run_bounded(
    command: Sequence[str],
    *,
    timeout_s: float,
    stdin: bytes = b"",
    max_bytes: int = 1 << 20,
    stop: Stopper | None = None,
    keeps_children: bool = False,
) -> ProgramEnd:
    """Run a program in a new session until the program itself ends; then, or at the deadline, kill its process group.

    Args:
        command: The program and its arguments.
        timeout_s: Seconds after which the process group is killed.
        stdin: The whole standard input.
        max_bytes: Bytes to keep of stdout, and of stderr; the middle is left out.
        stop: Kills the program from another thread.
        keeps_children: Whether children in the group may outlive a program that ends by itself. Their output is read for
            `DRAIN_S` more; what they write later has no reader.

    Raises:
        OSError: the program cannot be started.
        StoppedError: `stop` was set.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        stdin=pipe if stdin else subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        cwd=tempfile.gettempdir(),  # podman's monitor leaves a file in its working folder when memory runs out
        start_new_session=True,
        bufsize=0,
    ) as process:
        try:
            if stop is not None:
                stop.watch(process)
            streams = {process.stdout: Bounded(max_bytes), process.stderr: Bounded(max_bytes)}
            until = time.monotonic() + timeout_s
            is_late = _pump(process, streams, stdin, until=until, keeps_children=keeps_children)
        finally:
            if not (keeps_children and _has_ended(process)):
                _kill(process)
            if stop is not None:
                stop.watch(None)  # from here on, the process is reaped, and its id may be reused
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
    if stop is not None and stop.is_set:
        raise StoppedError
    out, err = streams[process.stdout], streams[process.stderr]
    return ProgramEnd(
        exit_code=process.returncode,
        stdout=out.value(),
        stderr=err.value(),
        is_late=is_late,
        is_truncated=bool(out.num_left_out or err.num_left_out),
    )


def _pump(
    process: subprocess.Popen[bytes], streams: Mapping[Any, Bounded], stdin: bytes, *, until: float, keeps_children: bool
) -> bool:
    """Copy bytes between the program and its streams until the program ends; return whether the deadline came first."""
    rest, ended_at = memoryview(stdin), None
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as opened:
        for stream in streams:
            selector.register(stream, selectors.EVENT_READ)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
        ends = _end_of(process, opened)
        if ends is not None:
            selector.register(ends, selectors.EVENT_READ)
        while True:
            now = time.monotonic()
            if ended_at is None and _has_ended(process):
                ended_at = now
                if not keeps_children:
                    _kill(process)
            limit = until if ended_at is None else ended_at + DRAIN_S
            if now >= limit or (ended_at is not None and not any(s in selector.get_map() for s in streams)):
                return ended_at is None
            wait_s = limit - now if ends is not None or ended_at is not None else min(LOOK_S, limit - now)
            ready = selector.select(wait_s)
            if ended_at is not None and not ready:
                return False
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    try:
                        rest = rest[os.write(key.fd, rest[:CHUNK]) :]
                    except BrokenPipeError:
                        rest = rest[:0]
                    if not rest:
                        selector.unregister(key.fileobj)
                        process.stdin.close()
                elif key.fileobj is ends:
                    selector.unregister(key.fileobj)
                    ends = ends if _has_ended(process) else None
                elif data := os.read(key.fd, CHUNK):
                    streams[key.fileobj].add(data)
                else:
                    selector.unregister(key.fileobj)


def _end_of(process: subprocess.Popen[bytes], opened: contextlib.ExitStack) -> int | None:
    """Return a descriptor that becomes readable when the program ends; None on systems without pidfd."""
    if not hasattr(os, "pidfd_open"):
        return None
    descriptor = os.pidfd_open(process.pid)
    opened.callback(os.close, descriptor)
    return descriptor


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether the program has ended. It is not reaped, so that its id still means its own process group."""
    if not hasattr(os, "waitid"):  # macOS with Python before 3.13, where children of an ended program are not killed
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the program's process group, unless the program was reaped: its id may then have been reused."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
