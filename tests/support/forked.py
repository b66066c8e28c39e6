"""Commands in processes of their own that need not import anything: one that has imported it all is forked for each.

    run = Forked("train", config, "train.steps=2")        `polyturn train …`, 5 seconds of imports sooner
    run.kill();  run.wait()                               -9, as of any other process
    run.err                                               what it has written so far

For tests of what takes a process: a signal, a kill, an end that does not come. How Python starts one is tested elsewhere.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

IMPORTED = (
    *("polyturn.cli.main", "polyturn.cli.train", "polyturn.cli.evaluate", "polyturn.build", "polyturn.serving"),
    *("transformers.models.qwen3.modeling_qwen3", "matplotlib.backends.backend_agg", "matplotlib.figure"),
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
"""Read when torch is imported, so the same for all."""
_LONGEST = 2**20


class Forked:
    """A command, running."""

    def __init__(
        self,
        *arguments: object,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        call: str = "polyturn.cli.main:main",
    ) -> None:
        """Start it.

        Args:
            arguments: What follows `polyturn` on the command line.
            cwd: Its folder; this process's by default.
            env: Its environment variables; this process's by default.
            call: What is called with these in `sys.argv`.
        """
        self._written = (tempfile.TemporaryFile(), tempfile.TemporaryFile())  # noqa: SIM115 - closed when this is gone
        self._told, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        wanted = {
            "call": call,
            "arguments": [str(a) for a in arguments],
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
        }
        with other:
            handed = [*(file.fileno() for file in self._written), other.fileno()]
            socket.send_fds(_server(), [json.dumps(wanted).encode()], handed)
        self.returncode: int | None = None
        """As `subprocess` has it: negative where a signal ended it, None while it runs."""
        self.pid = int(self._told.recv(64))

    @property
    def out(self) -> str:
        """What it has written to standard output so far."""
        return self._read(0)

    @property
    def err(self) -> str:
        return self._read(1)

    def _read(self, which: int) -> str:
        descriptor = self._written[which].fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended and return its exit code; raises TimeoutError."""
        if self.returncode is None:
            self._told.settimeout(timeout)
            said = self._told.recv(64)
            assert said, "the process that waits for it was killed"
            self.returncode = int(said)
        return self.returncode

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        try:
            return self.wait(0)
        except BlockingIOError:
            return None

    def send_signal(self, number: int) -> None:
        """Send it a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def wait_until(self, is_so: Callable[[], bool], *, within_s: float = 240.0) -> None:
        """Wait until something holds while it runs; fails where it ends before, or where that takes too long."""
        deadline = time.monotonic() + within_s
        while not is_so() and self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_so(), f"it did not come in {within_s:g} s, or the process ended ({self.returncode}): {self.out}{self.err}"


@contextlib.contextmanager
def served(*arguments: object, cwd: Path | None = None) -> Iterator[tuple[Forked, str]]:
    """Run a command that serves; give it and its address, end it with SIGTERM and check that it ends well."""
    run = Forked(*arguments, cwd=cwd)
    try:
        run.wait_until(lambda: re.search(r"listening on\s+http://\S+\s", run.err) is not None)
        (address,) = re.findall(r"listening on\s+(http://\S+)", run.err)
        yield run, address
        run.send_signal(signal.SIGTERM)
        assert run.wait(280) == 0, run.err
    finally:
        run.kill()


def run_forked(*arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Forked:
    """Run a command to its end, of which there are 280 seconds."""
    run = Forked(*arguments, cwd=cwd, env=env)
    try:
        run.wait(280)
    finally:
        run.kill()
    return run


def run_program(code: str, *arguments: object, cwd: Path | None = None) -> Forked:
    """Run a program to its end, as `python -c` would."""
    run = Forked(code, *arguments, cwd=cwd, call="support.forked:run_code")
    try:
        run.wait(280)
    finally:
        run.kill()
    return run


def run_code() -> None:
    """Run the program that `sys.argv[1]` is: what a `Forked` may call in place of a command."""
    code, sys.argv[:2] = sys.argv[1], ["-c"]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def run_file() -> None:
    """Run the program in the file `sys.argv[1]`: what a `Forked` may call in place of a command."""
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


@functools.cache
def _server() -> socket.socket:
    """Start the process that is forked, once, and return the socket that it listens to; it ends with this one."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    tests = Path(__file__).parents[1]
    code = f"import sys; sys.path.insert(0, {str(tests)!r}); from support import forked; forked.serve({its.fileno()})"
    env = {**os.environ, **ONE_THREAD}
    process = subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=[its.fileno()], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    its.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def serve(descriptor: int) -> None:
    """Import what commands need, and fork for each that is asked for."""
    for module in IMPORTED:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the processes that wait have no parent that waits for them
    with socket.socket(fileno=descriptor) as asked:
        while True:
            message, files, _, _ = socket.recv_fds(asked, _LONGEST, 3)
            if not message:
                return
            if os.fork() == 0:
                asked.close()
                _watch(json.loads(message), *files)
            for file in files:
                os.close(file)


def _watch(wanted: Mapping[str, str], out: int, err: int, told: int) -> None:
    """Fork the command, tell its number, wait for its end and tell its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(told)
        _become(wanted, out, err)
    os.write(told, str(pid).encode())
    _, status = os.waitpid(pid, 0)
    os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(wanted: Mapping[str, str], out: int, err: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # one that a shell began in the background ignores it
    for descriptor, file in ((1, out), (2, err)):
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(wanted["cwd"])
    os.environ.clear()
    os.environ.update(wanted["env"])
    sys.argv = ["polyturn", *wanted["arguments"]]
    sys.orig_argv = [sys.executable, "-m", *sys.argv]  # what the launcher of several ranks starts each with
    module, _, name = wanted["call"].partition(":")
    sys.exit(getattr(importlib.import_module(module), name)())
