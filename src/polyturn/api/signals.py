"""Record signals, so that a run can end with a checkpoint instead of an exception in the middle of a step."""

from __future__ import annotations

import _thread
import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from types import FrameType, TracebackType
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SAVING = "interrupted; a checkpoint is being written (interrupt again to stop without it)"
_CANCELLING = "interrupted; the running episodes are being cancelled (interrupt again to stop waiting for them)"


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
        signal.signal(number, self._former[number])
        if number == signal.SIGHUP:  # the terminal is gone, so writing to it would raise
            with open(os.devnull, "wb") as nowhere:
                for fd in self._on_terminal:
                    os.dup2(nowhere.fileno(), fd)
        self.note(number)

    def note(self, number: int) -> None:
        """Record a signal."""
        self.received.append(number)
        # From a thread, because this code may interrupt a write to the same file, which is not reentrant.
        _thread.start_new_thread(logger.warning, (self._message,))
        self.on_signal()


async def until_interrupted(work: Coroutine[Any, Any, T], signals: Callable[..., Signals]) -> T:
    """Await `work`, which writes no checkpoint. A signal that the caller's thread passes on cancels it.

    Raises:
        KeyboardInterrupt: a signal was passed on.
    """
    passed_on = signals(message=_CANCELLING)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    passed_on.on_signal = lambda: loop.call_soon_threadsafe(task.cancel)
    if passed_on.received:
        task.cancel()
    try:
        return await work
    except asyncio.CancelledError:
        if not passed_on.received:
            raise
        raise KeyboardInterrupt from None
    finally:
        passed_on.on_signal = lambda: None
