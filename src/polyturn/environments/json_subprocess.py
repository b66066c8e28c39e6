"""JsonSubprocess: a process that answers requests, one JSON object per line, for code that needs another interpreter.

    worker = JsonSubprocess(("/venv/bin/python", "worker.py"), name="verifiers:my_env")
    worker.ask("load", env="my_env")               blocks; used before a run
    await worker.call("rollout", input={…})        many at once; cancelling the call cancels the request in the process

The process starts with the first request; if it has died, the next request starts it again. It ends when its input closes or
this process dies. The end of its output is kept for error messages. It gets a few of the trainer's environment variables
(`core.secrets.PASSED_ON` and the settings of caches) and no secrets except those in `variables`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from polyturn.core.errors import SchedulerError
from polyturn.core.secrets import passed_on
from polyturn.infra.process import ManagedProcess, is_readable

_CACHES = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "XDG_CACHE_HOME")
END_S = 5.0
"""Seconds between closing the process's input and killing it."""
_TAIL_BYTES = 2000
_LOOK_S = 1.0
"""Seconds after which a process without output is checked for its end."""


class WorkerRefusal(SchedulerError):
    """The process answered a request with an error."""

    def __init__(self, message: str, *, is_download: bool = False) -> None:
        super().__init__(message)
        self.is_download = is_download


class JsonSubprocess:
    """A process and its unanswered requests."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        variables: Mapping[str, str] | None = None,
        greet: Callable[[Callable[..., Any]], Any] | None = None,
    ) -> None:
        """Describe the process; the first request starts it.

        Args:
            command: The program and its arguments.
            name: The process's name in messages.
            variables: Further environment variables.
            greet: Called with `ask` after each start of the process.
        """
        self._command = tuple(command)
        self._name = name
        self._variables = dict(variables or {})
        self._greet = greet
        self._lock = threading.RLock()
        self._ids = itertools.count(1)
        self._process: ManagedProcess | None = None
        self._waiting: dict[int, Future[Any]] = {}
        """Unanswered requests of the current process; each start makes a new dict, which belongs to the new process."""
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The id of the running process; None if it is not running."""
        return None if self._process is None or not self._process.is_alive else self._process.pid

    def ask(self, do: str, *, timeout_s: float | None = None, **arguments: Any) -> Any:
        """Send a request and block until the answer; do not call it on an event loop that has other work.

        Raises:
            WorkerRefusal: the process answered with an error.
            SchedulerError: the process has died, or the timeout has passed.
        """
        _, answer = self._send(do, arguments)
        try:
            return answer.result(timeout_s)
        except TimeoutError as problem:
            raise SchedulerError(f"{self._name}: took longer than {timeout_s:g} s to {do}: {self._tail()}") from problem

    async def call(self, do: str, **arguments: Any) -> Any:
        """Send a request and await the answer.

        Raises:
            WorkerRefusal: the process answered with an error.
            SchedulerError: the process has died.
        """
        await asyncio.to_thread(self.start)
        id, answer = self._send(do, arguments)
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            with contextlib.suppress(SchedulerError):
                self._write({"cancel": id})
            raise

    def close(self) -> None:
        """End the process; kill it if it does not exit in time. May be called twice."""
        atexit.unregister(self.close)
        with self._lock:
            self._is_closed = True
            process, self._process = self._process, None
        if process is not None:
            process.end(grace_s=END_S, asks=False)

    def _send(self, do: str, arguments: Mapping[str, Any]) -> tuple[int, Future[Any]]:
        id, answer = next(self._ids), Future[Any]()
        with self._lock:  # the process that gets the request must be the one whose answers are read into `waiting`
            self.start()
            waiting = self._waiting
            waiting[id] = answer
            try:
                self._write({"id": id, "do": do, **arguments})
            except SchedulerError:
                waiting.pop(id, None)
                raise
        return id, answer

    def _write(self, request: Mapping[str, Any]) -> None:
        line = json.dumps(request) + "\n"
        with self._lock:
            process = self._process
            try:
                if process is None or process.stdin is None:
                    raise BrokenPipeError
                process.stdin.write(line.encode())
                process.stdin.flush()
            except (BrokenPipeError, OSError, ValueError) as problem:
                raise SchedulerError(f"{self._name}: its process has ended: {self._tail()}") from problem

    def start(self) -> None:
        """Start the process unless it is running.

        Raises:
            WorkerRefusal: a request of `greet` was refused.
            SchedulerError: the process cannot be started.
        """
        with self._lock:
            if self._is_closed:
                raise SchedulerError(f"{self._name}: the run has ended")
            if self.pid is not None:
                return
            try:
                self._process = process = ManagedProcess(
                    self._command, env={**passed_on(*_CACHES), **self._variables}, pipes=True
                )
            except OSError as problem:
                raise SchedulerError(
                    f"{self._name}: {self._command[0]!r} cannot be started ({problem.strerror})"
                ) from problem
            atexit.register(self.close)
            self._waiting = {}
            threading.Thread(
                target=self._read, args=(process, self._waiting), name=f"answers-{self._name}", daemon=True
            ).start()
            if self._greet is not None:
                try:
                    self._greet(self.ask)
                except BaseException:
                    self._process = None
                    process.end(grace_s=END_S, asks=False)
                    raise

    def _read(self, process: ManagedProcess, waiting: dict[int, Future[Any]]) -> None:
        """Deliver a process's answers to the requests `waiting`; fail the rest when the process has ended."""
        with contextlib.suppress(ValueError):  # the output was closed while this thread was reading
            for line in _lines_of(process):
                try:
                    reply = json.loads(line)
                    answer = waiting.pop(reply["id"], None)
                except (ValueError, KeyError, TypeError, RecursionError):
                    # Not an answer: code in the process may print anything.
                    continue
                if answer is None or not answer.set_running_or_notify_cancel():
                    continue
                if "error" in reply:
                    answer.set_exception(WorkerRefusal(str(reply["error"]), is_download=bool(reply.get("is_download"))))
                else:
                    answer.set_result(reply.get("value"))
        process.wait(END_S)
        process.end()  # without output it is of no use; children that outlived it end, too
        while waiting:
            _, answer = waiting.popitem()
            if answer.set_running_or_notify_cancel():
                answer.set_exception(SchedulerError(f"{self._name}: its process has ended: {self._tail(process)}"))

    def _tail(self, process: ManagedProcess | None = None) -> str:
        process = process or self._process
        tail = "" if process is None else process.tail(3)
        return " / ".join(tail.splitlines())[-_TAIL_BYTES:] or "it wrote nothing"


def _lines_of(process: ManagedProcess) -> Iterator[bytearray]:
    """Yield the lines of a process's output until the process ends; its children may keep the output open for longer."""
    assert process.stdout is not None
    start_of_line = bytearray()
    while True:
        is_alive = process.is_alive
        if not is_readable(process.stdout.fileno(), timeout_s=_LOOK_S):
            if not is_alive:
                return
            continue
        data = process.stdout.read1(1 << 16)
        if not data:
            return
        start_of_line += data
        if b"\n" in data:
            *lines, start_of_line = start_of_line.split(b"\n")
            yield from lines
