"""Ends a command's process even if plug-ins left threads or exit handlers running.

Python waits for both without a limit, so a finished run would hang on a plug-in's thread. Here the process ends after
`GRACE_S`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

logger = logging.getLogger(__name__)

GRACE_S = 4.0
"""Seconds for threads and exit handlers after a command is done."""


def end_process(run: Callable[[], object]) -> NoReturn:
    """Call `run`, and end the process with its exit code within `GRACE_S`, without finalising objects."""
    code = 1
    atexit.register(lambda: _leave(code))  # handlers run in reverse order, so this one runs after the handlers of plug-ins
    try:
        run()
        sys.exit(0)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        threading.Thread(target=_abandon, args=(code,), name="polyturn-end", daemon=True).start()


def _abandon(code: int) -> None:
    """End the process even if threads or handlers are still running; called in a thread."""
    time.sleep(GRACE_S)
    threads = [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    left = ", ".join(f"the thread {thread.name!r}" for thread in threads) or "an exit handler"
    logger.warning("abandoned at the end of the process: %s", left)
    _leave(code)


def _leave(code: int) -> None:
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if the process was started with it closed
        with contextlib.suppress(OSError, ValueError):  # the reader is gone
            stream.flush()
    os._exit(code)
