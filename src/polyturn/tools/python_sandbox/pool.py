"""Sandboxes that wait, started already, so that the first run of an episode does not wait for one.

    pool.open() … pool.take() -> Interpreter … pool.close()        counted: the last close lets the waiting ones go

All are started by one thread that lives as long as the pool has users or waiting sandboxes, because the kernel kills a
sandbox when the thread that started it ends: nothing outlives this process, however it ends.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from polyturn.tools.python_sandbox.cgroup import sweep
from polyturn.tools.python_sandbox.interpreter import Interpreter, SandboxStartError


class WarmPool:
    """Keeps `size` sandboxes ready while it is open."""

    def __init__(self, start: Callable[[], Interpreter], *, size: int = 2, keep_s: float = 10.0) -> None:
        """Make a pool.

        Args:
            start: Starts a sandbox.
            size: How many wait.
            keep_s: How long they wait on when the last user has gone.
        """
        self._start = start
        self._size = size
        self._keep_s = keep_s
        self._changed = threading.Condition()
        self._ready: deque[Interpreter] = deque()
        self._wanted: deque[Future[Interpreter]] = deque()
        self._num_users = 0
        self._thread: threading.Thread | None = None
        self._is_broken = False
        self._is_starting = False

    @property
    def num_ready(self) -> int:
        """How many sandboxes wait."""
        return len(self._ready)

    def open(self) -> None:
        """Count a user; the first one starts the pool."""
        with self._changed:
            self._num_users += 1
            self._is_broken = False
            self._ensure_thread()
            self._changed.notify_all()

    def close(self) -> None:
        """Count a user out."""
        with self._changed:
            self._num_users -= 1
            self._changed.notify_all()

    def take(self) -> Interpreter:
        """Return a sandbox that nobody has used; the caller closes it.

        Raises:
            SandboxStartError: it cannot be started.
        """
        with self._changed:
            while self._ready:
                found = self._ready.popleft()
                self._changed.notify_all()
                if found.is_alive:
                    return found
                found.close()
            wanted: Future[Interpreter] = Future()
            self._wanted.append(wanted)
            self._ensure_thread()
            self._changed.notify_all()
        return wanted.result()

    def let_go(self) -> None:
        """Close the sandboxes that wait, at once, and start none until somebody asks; those taken live on."""
        with self._changed:
            self._is_broken = True
            while self._is_starting:
                self._changed.wait()
            ready = list(self._ready)
            self._ready.clear()
        for one in ready:
            one.close()

    def _ensure_thread(self) -> None:
        if self._thread is None:
            sweep()
            self._thread = threading.Thread(target=self._work, name="polyturn-sandboxes", daemon=True)
            self._thread.start()
            atexit.register(self.let_go)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._wanted and not self._is_short():
                    was_notified = self._changed.wait(None if self._num_users else self._keep_s)
                    if not was_notified and not self._num_users and not self._wanted:
                        self._thread = None
                        atexit.unregister(self.let_go)
                        break
                wanted = self._wanted.popleft() if self._wanted else None
                if self._thread is None:
                    break
                self._is_starting = True
            self._start_one(wanted)
        self.let_go()

    def _is_short(self) -> bool:
        return self._num_users > 0 and len(self._ready) < self._size and not self._is_broken

    def _start_one(self, wanted: Future[Interpreter] | None) -> None:
        try:
            made = self._start()
        except Exception as problem:
            self._note_started()
            if wanted is not None:
                error = problem if isinstance(problem, SandboxStartError) else SandboxStartError(str(problem))
                wanted.set_exception(error)
            self._is_broken = wanted is None
            return
        self._note_started(None if wanted is not None else made)
        if wanted is not None:
            self._is_broken = False
            wanted.set_result(made)

    def _note_started(self, made: Interpreter | None = None) -> None:
        with self._changed:
            self._is_starting = False
            if made is not None:
                self._ready.append(made)
            self._changed.notify_all()
