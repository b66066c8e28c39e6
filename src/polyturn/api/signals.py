"""Record signals, so that a run can end with a checkpoint instead of an exception in the middle of a step.

    called in     work runs in       at SIGINT
    a script      this thread        the work is cancelled; training writes a checkpoint
    a notebook    another thread     the waiting thread passes SIGINT on; the work is cancelled; training writes a checkpoint

A notebook runs its cells inside an event loop, and a thread can run only one event loop at a time. Interrupting a cell sends
SIGINT.
"""

from __future__ import annotations

import _thread
import asyncio
import contextvars
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import FrameType, TracebackType
from typing import Any, TypeVar

from polyturn.core.errors import RankLostError

logger = logging.getLogger(__name__)

T = TypeVar("T")
_LOOK_S = 0.5
"""Seconds between two checks whether all ranks are alive."""
_SAVING = "interrupted; an update under way ends, and a checkpoint is written (interrupt again to stop at once without it)"
CANCELLING = "interrupted; the running episodes are being cancelled (interrupt again to stop waiting for them)"


class Signals:
    """Records SIGINT, SIGTERM and SIGHUP instead of ending the process; a second one of the same kind has its usual effect.

    Signals that the process already ignores, as under `nohup`, stay ignored. A signal is recorded even while Python code of
    a plug-in blocks the event loop. Python runs handlers in the main thread only; for a run in another thread, the caller
    passes signals on with `note`.
    """

    def __init__(self, *, message: str = _SAVING) -> None:
        """Record nothing yet; `message` is logged at the first signal."""
        self.on_signal: Callable[[], object] = lambda: None
        """Called for each recorded signal."""
        self.received: list[int] = []
        self.is_repeated = False
        """Whether a second SIGINT has come, which raises KeyboardInterrupt."""
        self._message = message
        self._former: dict[int, Any] = {}
        self._on_terminal = [fd for fd in (1, 2) if os.isatty(fd)]

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            former = signal.getsignal(number)
            if former is signal.SIG_DFL or (former is not signal.SIG_IGN and number != signal.SIGHUP):
                self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def _note(self, number: int, frame: FrameType | None) -> None:
        former = self._former[number]
        signal.signal(number, self._repeat if callable(former) else former)
        if number == signal.SIGHUP:  # the terminal is gone, so writing to it would raise
            with open(os.devnull, "wb") as nowhere:
                for fd in self._on_terminal:
                    os.dup2(nowhere.fileno(), fd)
        self.note(number)

    def _repeat(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, self._former[number])
        self.is_repeated = True
        self._former[number](number, frame)

    def note(self, number: int) -> None:
        """Record a signal."""
        self.received.append(number)
        # From a thread, because this code may interrupt a write to the same file, which is not reentrant.
        _thread.start_new_thread(logger.warning, (self._message,))
        self.on_signal()


async def until_done(
    work: Coroutine[Any, Any, T],
    signals: Signals,
    *,
    message: Callable[[], str] | None = None,
    lost: Callable[[], str | None] = lambda: None,
) -> T:
    """Await `work`. A recorded signal cancels it; then `message` is logged, and the exit status is 128 + the signal.

    A second signal of the same kind ends the process at once; the previous checkpoint stays intact.

    Raises:
        RankLostError: `lost` reports that a rank is gone. The work is cancelled at once, even during a long rollout.
    """
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    watching = asyncio.create_task(_cancel_when_lost(task, lost), name="trainer ranks")
    signals.on_signal = lambda: loop.call_soon_threadsafe(task.cancel)
    if signals.received:
        loop.call_soon(task.cancel)  # after it has started, so that it writes a checkpoint
    try:
        return await task
    except asyncio.CancelledError:
        if (problem := lost()) is not None:
            raise RankLostError(problem) from None
        if not signals.received or signals.is_repeated:
            raise
        if message is not None:
            logger.warning("%s", message())
        raise SystemExit(128 + signals.received[0]) from None
    finally:
        watching.cancel()
        signals.on_signal = lambda: None


async def _cancel_when_lost(task: asyncio.Future[Any], lost: Callable[[], str | None]) -> None:
    while lost() is None:  # noqa: ASYNC110 - the end of a process is not an event of this loop
        await asyncio.sleep(_LOOK_S)
    task.cancel()


def run_beside(work: Callable[[Callable[..., Signals]], T]) -> T:
    """Call `work` with a function that makes the run's `Signals`, and return the result; in another thread if this thread
    already runs an event loop.

    Raises:
        KeyboardInterrupt: the work was interrupted, and this thread runs an event loop. Without an event loop, SystemExit
            ends the process, as in a command.
    """
    try:
        is_beside = asyncio.get_running_loop() is not None
    except RuntimeError:
        is_beside = False
    if not is_beside:  # outside `except`, so that errors of the work do not refer to it
        return work(Signals)
    handlers: list[Signals] = []
    is_interrupted = threading.Event()

    def signals(**options: str) -> Signals:
        handlers.append(Signals(**options))
        if is_interrupted.is_set():  # for example while the model was loaded
            handlers[-1].note(signal.SIGINT)
        return handlers[-1]

    def interrupt() -> None:
        is_interrupted.set()
        for latest in handlers[-1:]:
            latest.note(signal.SIGINT)

    return wait_for(in_thread(lambda: work(signals)), on_interrupt=interrupt)


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
