"""Processes: calls a plain reward function in the main thread of another process, where signals work.

    scorer = Processes("grade.py:compute_score", num=4, timeout_s=60.0)
    scorer(solution_str="…", ground_truth="4")        in a thread; blocks until a process has answered

A function may have a timeout that uses signals, as math-verify does. In any other thread than the main one, setting it
raises, and a function that treats this error as a wrong answer would score every text 0.0. If a call misses its deadline,
its process is killed. The functions must not rely on state in their module, because each process has its own.

Why not Pebble's pool: its workers are processes of multiprocessing, whose `spawn` imports the user's main script in each
worker. The pool also cannot start workers with `-P`, so a file in the working folder could hide a module of the standard
library.
"""

from __future__ import annotations

import socket
import sys
import threading
import weakref
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal

from polyturn.core.errors import RewardError, one_line
from polyturn.infra.deadline import Stretch
from polyturn.infra.plugins import NAMESPACES, offered
from polyturn.infra.process import ManagedProcess

END_S = 5.0
"""Seconds that a process may take to end after closing its output."""
START_S = 300.0
"""Seconds that a process may take to import the function's module."""


class LateCallError(TimeoutError):
    """A call missed its deadline."""


class EndedCallError(RewardError):
    """A process ended during a call."""


class Processes:
    """Up to `num` processes that call one function, started on demand and reused."""

    def __init__(
        self,
        function: str,
        *,
        base: Path | None = None,
        num: int,
        timeout_s: float,
        log: Literal["inherited", "none"] = "inherited",
    ) -> None:
        """Set the function; no process starts yet.

        Args:
            function: `file.py:name` or `pkg.mod:name`. If it is a class, each process creates one object and calls that.
            base: The folder from which a relative file path starts.
            num: Largest number of concurrent calls.
            timeout_s: Seconds that one call may take.
            log: Whether the function's output goes to the output of this process ("inherited") or nowhere ("none").
        """
        self._function = function
        self._base = base
        self.timeout_s = timeout_s
        self._log = log
        self._free = threading.Semaphore(num)
        self._idle: list[_Process] = []
        weakref.finalize(self, _close, self._idle)  # or when this process exits

    def __call__(self, **arguments: Any) -> Any:
        """Call the function in one of the processes and return its result.

        Raises:
            LateCallError: the call missed its deadline.
            EndedCallError: the process ended.
            RewardError: the function raised, no process could be started, or arguments or result cannot be pickled.
        """
        try:
            message = ForkingPickler.dumps(arguments)
        except Exception as problem:
            raise RewardError(
                f"the arguments of {self._function} cannot be sent to its process: {one_line(problem)}"
            ) from problem
        with Stretch.paused(), self._free:
            process = self._idle.pop() if self._idle else _Process(self._function, self._base, self._log)
            try:
                is_returned, value = process.call(message, timeout_s=self.timeout_s)
            except BaseException:
                process.close()  # its answer may still arrive; reused, the process would give it to the next call
                raise
            self._idle.append(process)
        if not is_returned:
            raise RewardError(str(value))
        return value

    def close(self) -> None:
        """End the idle processes."""
        _close(self._idle)


def _close(processes: list[_Process]) -> None:
    while processes:
        processes.pop().close()


class _Process:
    """One process that calls a function; see `process_worker`."""

    def __init__(self, function: str, base: Path | None, log: Literal["inherited", "none"]) -> None:
        self._hint = "; its output says why" if log == "inherited" else ""
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-P", "-m", "polyturn.rewards.process_worker", str(number)]
            self._process = ManagedProcess(command, pass_fds=[number], log=log)
        self._connection = Connection(ours.detach())
        stand_ins = [root for root in offered(NAMESPACES) if root in sys.modules]
        try:
            start = ForkingPickler.dumps((sys.path, stand_ins, function, base))
            self._exchange(start, timeout_s=START_S, what=" to import its module")
        except BaseException as problem:
            self.close()
            if isinstance(problem, LateCallError | EndedCallError):
                raise RewardError(str(problem)) from problem  # not a LateCallError: no call has been made yet
            raise

    def call(self, arguments: memoryview, *, timeout_s: float) -> tuple[bool, Any]:
        """Call the function with pickled arguments; return (True, its result), or (False, its error as text)."""
        answer: tuple[bool, Any] = self._exchange(arguments, timeout_s=timeout_s)
        return answer

    def _exchange(self, message: memoryview, *, timeout_s: float, what: str = "") -> Any:
        try:
            self._connection.send_bytes(message)
            if not self._connection.poll(timeout_s):
                raise LateCallError(f"it took longer than {timeout_s:g} s{what}")
            answer = self._connection.recv()
        except (EOFError, ConnectionError) as problem:
            self._process.wait(END_S)
            code = self._process.returncode
            raise EndedCallError(f"the process of the function ended with exit code {code}{self._hint}") from problem
        return answer

    def close(self) -> None:
        """End the process, even during a call."""
        self._process.end()
        self._connection.close()
