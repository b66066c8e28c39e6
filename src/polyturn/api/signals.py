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

from polyturn.core.errors import RankLostError

logger = logging.getLogger(__name__)

T = TypeVar("T")
_LOOK_S = 0.5
"""Seconds between two checks whether all ranks are alive."""
_SAVING = "interrupted; a checkpoint is being written (interrupt again to stop without it)"
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
        if not signals.received:
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
