"""Run coroutines from synchronous code: in this thread, or in another one if this thread already runs an event loop.

    called in     work runs in       at SIGINT
    a script      this thread        the work is cancelled; training writes a checkpoint
    a notebook    another thread     the waiting thread passes SIGINT on; the work is cancelled; training writes a checkpoint

A notebook runs its cells inside an event loop, and a thread can run only one event loop at a time. Interrupting a cell sends
SIGINT.
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from polyturn.api.signals import Signals

T = TypeVar("T")


def run_beside(work: Callable[[Callable[..., Signals]], T]) -> T:
    """Call `work` with a function that makes the run's `Signals`, and return the result.

    Raises:
        KeyboardInterrupt: the work was interrupted, and this thread runs an event loop. Without an event loop, SystemExit
            ends the process, as in a command.
    """
    if not _loop_runs():
        return work(Signals)
    notes: list[Signals] = []
    is_interrupted = threading.Event()

    def signals(**options: str) -> Signals:
        notes.append(Signals(**options))
        if is_interrupted.is_set():  # for example while the model was loaded
            notes[-1].note(signal.SIGINT)
        return notes[-1]

    def interrupt() -> None:
        is_interrupted.set()
        for latest in notes[-1:]:
            latest.note(signal.SIGINT)

    return wait_for(in_thread(lambda: work(signals)), on_interrupt=interrupt)


def _loop_runs() -> bool:
    """Return whether this thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a new thread with this thread's context variables."""
    result: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            result.set_result(context.run(work))
        except BaseException as problem:
            result.set_exception(problem)

    threading.Thread(target=run, name="polyturn", daemon=True).start()
    return result


def wait_for(result: Future[T], *, on_interrupt: Callable[[], object]) -> T:
    """Wait for a result. The first interrupt asks the work to end (`on_interrupt`); a second one stops waiting for it."""
    try:
        return result.result()
    except KeyboardInterrupt:
        if result.done():
            raise
        on_interrupt()
    try:
        return result.result()
    except SystemExit as ended:
        raise KeyboardInterrupt from ended
