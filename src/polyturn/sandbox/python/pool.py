"""WarmPool: sandboxes that are started in advance, so that the first run of an episode does not wait for a start.

    pool.open() … pool.take() -> Interpreter … pool.close()        `keep_s` seconds after the last close, it ends

A few threads start sandboxes concurrently. The kernel kills a sandbox when the thread that started it ends, so sandboxes
never outlive this process. Therefore the threads live as long as the pool has users or waiting sandboxes, and end together.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from polyturn.sandbox.python.cgroup import sweep
from polyturn.sandbox.python.interpreter import START_S, Interpreter, SandboxStartError

PAUSES_S = (0.1, 0.4)
"""Seconds to pause before each new try of a failed start, because a lack of processes or memory may be temporary."""
MAX_STARTERS = 8


class _Crew:
    """The threads that start sandboxes; they end together."""

    __slots__ = ("is_over", "num_idle", "num_threads")

    def __init__(self) -> None:
        self.is_over = False
        self.num_threads = 0
        self.num_idle = 0


class WarmPool:
    """Keeps `size` sandboxes ready while it is open."""

    def __init__(
        self, start: Callable[[], Interpreter], *, size: int = 2, keep_s: float = 10.0, num_starters: int | None = None
    ) -> None:
        """Make a pool.

        Args:
            start: Starts a sandbox; called in several threads concurrently.
            size: Number of sandboxes to keep ready.
            keep_s: Seconds for which they are kept after the last user has left.
            num_starters: Maximum number of concurrent starts; None for the number of cores, at most `MAX_STARTERS`.
        """
        self._start = start
        self._size = size
        self._keep_s = keep_s
        self._num_starters = num_starters or min(MAX_STARTERS, max(2, os.cpu_count() or 2))
        self._changed = threading.Condition()
        self._ready: deque[Interpreter] = deque()
        self._wanted: deque[Future[Interpreter]] = deque()
        self._num_users = 0
        self._crew: _Crew | None = None
        self._is_broken = False
        self._num_starting = 0
        self._num_warming = 0
        """Number of sandboxes that are being started in advance, without a waiting caller."""

    @property
    def num_ready(self) -> int:
        """Number of waiting sandboxes."""
        return len(self._ready)

    def open(self) -> None:
        """Add a user; the first one starts the pool.

        Raises:
            SandboxStartError: the machine cannot start a thread; the user is not counted.
        """
        with self._changed:
            self._num_users += 1
            self._is_broken = False
            try:
                self._grow()
            except SandboxStartError:
                self._num_users -= 1
                raise
            self._changed.notify_all()

    def close(self) -> None:
        """Remove a user."""
        with self._changed:
            self._num_users -= 1
            self._changed.notify_all()

    def take(self, *, within_s: float = START_S) -> Interpreter:
        """Return an unused sandbox, which the caller closes; a failed start is tried again.

        Raises:
            SandboxStartError: no sandbox could be started in time.
        """
        until = time.monotonic() + within_s
        for pause_s in PAUSES_S:
            try:
                return self._take(until)
            except SandboxStartError:
                if time.monotonic() + pause_s >= until:
                    raise
            time.sleep(pause_s)
        return self._take(until)

    def let_go(self) -> None:
        """Close the waiting sandboxes now, and start new ones only on demand; taken sandboxes are not affected."""
        with self._changed:
            self._is_broken = True
            while self._num_starting:
                self._changed.wait()
            ready = list(self._ready)
            self._ready.clear()
        for one in ready:
            one.close()

    def _take(self, until: float) -> Interpreter:
        with self._changed:
            while self._ready:
                interpreter = self._ready.popleft()
                self._changed.notify_all()
                if interpreter.is_alive:
                    return interpreter
                interpreter.close()
            wanted: Future[Interpreter] = Future()
            self._wanted.append(wanted)
            self._grow()
            self._changed.notify_all()
        try:
            return wanted.result(max(0.0, until - time.monotonic()))
        except TimeoutError as problem:
            with self._changed:
                if not wanted.cancel():  # the sandbox arrived at the last moment
                    return wanted.result()
            raise SandboxStartError(
                "no sandbox started in time, because this machine is too busy; run fewer at once (num_workers)"
            ) from problem

    def _grow(self) -> None:
        """Start threads for the wanted sandboxes. The caller holds the lock."""
        if self._crew is None:
            sweep()
            self._crew = _Crew()
            atexit.register(self.let_go)
        crew, missing = self._crew, self._size - len(self._ready) - self._num_warming
        needed = max(1, len(self._wanted) + (missing if self._num_users else 0))
        while crew.num_threads < self._num_starters and crew.num_idle < needed:
            thread = threading.Thread(target=self._work, args=(crew,), name="polyturn-sandboxes", daemon=True)
            try:
                thread.start()
            except RuntimeError as problem:  # the machine cannot start another thread
                if crew.num_threads:
                    return
                self._crew = None
                atexit.unregister(self.let_go)
                self._wanted.clear()
                raise SandboxStartError(f"no sandbox can be started: {problem}") from problem
            crew.num_threads += 1
            crew.num_idle += 1

    def _work(self, crew: _Crew) -> None:
        while True:
            with self._changed:
                if not self._await_work(crew):
                    crew.num_threads -= 1
                    return
                wanted = self._wanted.popleft() if self._wanted else None
                self._num_starting += 1
                self._num_warming += wanted is None
                crew.num_idle -= 1
            self._start_one(wanted, crew)

    def _await_work(self, crew: _Crew) -> bool:
        """Wait until a sandbox is wanted; return False once the threads should end. The caller holds the lock."""
        while not crew.is_over:
            while self._wanted and self._wanted[0].cancelled():
                self._wanted.popleft()
            if self._wanted or self._is_short():
                return True
            was_notified = self._changed.wait(None if self._num_users or self._num_starting else self._keep_s)
            if not (was_notified or crew.is_over or self._num_users or self._wanted or self._num_starting):
                crew.is_over, self._crew = True, None
                atexit.unregister(self.let_go)
                ready = list(self._ready)
                self._ready.clear()
                self._changed.notify_all()
                for one in ready:  # with the lock held, because the threads that started them end once it is released
                    one.close()
        return False

    def _is_short(self) -> bool:
        return self._num_users > 0 and len(self._ready) + self._num_warming < self._size and not self._is_broken

    def _start_one(self, wanted: Future[Interpreter] | None, crew: _Crew) -> None:
        interpreter: Interpreter | None = None
        error: SandboxStartError | None = None
        try:
            interpreter = self._start()
        except Exception as problem:
            error = problem if isinstance(problem, SandboxStartError) else SandboxStartError(str(problem))
        with self._changed:
            self._num_starting -= 1
            self._num_warming -= wanted is None
            crew.num_idle += 1
            if wanted is None or wanted.cancelled():
                self._is_broken = self._is_broken or error is not None
                if interpreter is not None:
                    self._ready.append(interpreter)
            elif error is not None:
                wanted.set_exception(error)
            else:
                assert interpreter is not None
                self._is_broken = False
                wanted.set_result(interpreter)
            self._changed.notify_all()
