"""Record signals, so that a run can end with a checkpoint instead of an exception in the middle of a step."""

from __future__ import annotations

import _thread
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)


class Signals:
    """Records SIGINT, SIGTERM and SIGHUP instead of ending the process; a second one of the same kind has its usual effect.

    Signals that the process already ignores, as under `nohup`, stay ignored. A signal is recorded even while Python code of
    a plug-in blocks the event loop. Python runs handlers in the main thread only; for a run in another thread, the caller
    passes signals on with `note`.
    """

    def __init__(self) -> None:
        self.on_signal: Callable[[], object] = lambda: None
        """Called for each recorded signal."""
        self.received: list[int] = []
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
        message = "interrupted; a checkpoint is being written (interrupt again to stop without it)"
        _thread.start_new_thread(logger.warning, (message,))
        self.on_signal()
