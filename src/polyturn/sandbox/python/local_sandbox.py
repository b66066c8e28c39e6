"""Runs programs for rewards on this machine, each in a separate sandbox, as `polyturn serve --sandbox` does.

    local_sandbox(timeout_s=10, memory_mb=1024).run("print(int(input()) + 1)", stdin="1")
    ->  {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "2\\n", …}, …}

The calls block; rewards make them in threads. As many programs run at once as there are cores, but at least two. The others
wait, and the wait does not count towards their time limit. No program sees files or processes of another program.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Mapping
from typing import Any

from polyturn.core.errors import ConfigError, RewardError, one_line
from polyturn.sandbox.python import isolation
from polyturn.sandbox.python.fusion import reply_of
from polyturn.sandbox.python.interpreter import Interpreter, SandboxStartError
from polyturn.sandbox.python.limits import OUTPUT_OF_PROGRAMS, SandboxLimits
from polyturn.sandbox.python.pool import WarmPool


class LocalSandbox:
    """Runs programs with the isolation that this machine supports."""

    def __init__(self, limits: SandboxLimits, *, python: str) -> None:
        self._limits = limits
        self._python = python
        cores = max(2, os.cpu_count() or 2)
        self._slots = threading.Semaphore(cores)
        self._pool = WarmPool(self._start, size=cores)

    def require(self) -> None:
        """Check that this machine can isolate code.

        Raises:
            ConfigError: it cannot, or the interpreter does not start.
        """
        try:
            isolation.interpreter_folders(self._python)
            program, why = isolation.find_isolation()
            if program is isolation.Isolation.NONE:
                raise ConfigError(why)
        except ConfigError as problem:
            raise ConfigError(
                f"programs are scored in a sandbox, reward.sandbox.url is not set, and this machine has none: {problem}. "
                "Set reward.sandbox.url to a SandboxFusion address to run programs elsewhere"
            ) from problem

    def run(self, code: str, *, stdin: str) -> Mapping[str, Any]:
        """Run a program and return the result in the form of a SandboxFusion service.

        Raises:
            RewardError: no sandbox could be started.
            ConfigError: this machine cannot isolate code.
        """
        self.require()
        with self._slots:
            self._pool.open()
            try:
                return self._run(code, stdin)
            except SandboxStartError as problem:
                raise RewardError(f"a program could not be run: {one_line(problem)}") from problem
            finally:
                self._pool.close()

    def _run(self, code: str, stdin: str) -> Mapping[str, Any]:
        size = len(stdin.encode("utf-8", "surrogatepass"))
        if size > self._limits.disk_mb << 19:  # leaves half of the disk to the program's files
            raise RewardError(f"a test's input has {size:,} bytes; the sandbox takes half of {self._limits.disk_mb} MiB")
        sandbox = self._pool.take()
        try:
            return reply_of(sandbox.run_program(code, stdin=stdin))
        finally:
            sandbox.close()

    def _start(self) -> Interpreter:
        return Interpreter(self._limits, isolation=isolation.require_isolation(allow_unsafe=False), python=self._python)


@functools.cache
def local_sandbox(*, timeout_s: float, memory_mb: int, python: str | None = None) -> LocalSandbox:
    """Return the sandbox with these limits; all rewards of the process share it.

    Raises:
        ConfigError: a limit is invalid.
    """
    limits = SandboxLimits(timeout_s=timeout_s, memory_mb=memory_mb, output_bytes=OUTPUT_OF_PROGRAMS)
    return LocalSandbox(limits, python=python or isolation.bare_python())
