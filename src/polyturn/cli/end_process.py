"""End a command's process despite threads, tasks and exit handlers that plug-ins left running.

Python ends a process only after all non-daemon threads and exit handlers, and then closes waiting coroutines, which runs
their code again. Threads and handlers of plug-ins get `GRACE_S` and are then logged and abandoned; objects are not
finalised.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from polyturn.core.code_origin import place_of

logger = logging.getLogger(__name__)

GRACE_S = 4.0
"""Seconds for threads and exit handlers after a command is done."""


def end_process(run: Callable[[], object]) -> NoReturn:
    """Call `run`, and end the process with its exit code within `GRACE_S`."""
    code = 1
    atexit.register(lambda: _leave(code))  # handlers run in reverse order, so this one runs after those of plug-ins
    try:
        run()
        sys.exit(0)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        threading.Thread(target=partial(_end_anyway, code), name="polyturn-end", daemon=True).start()


def _end_anyway(code: int) -> None:
    """End the process although threads or handlers are still running; runs in a thread."""
    time.sleep(GRACE_S)
    frames = sys._current_frames()
    left = [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread() and t.ident in frames]
    for thread in left:
        frame = frames[thread.ident or 0]
        location = (
            place_of([f for f, _ in traceback.walk_stack(frame)][::-1]) or f"{frame.f_code.co_filename}:{frame.f_lineno}"
        )
        logger.warning("abandoned at the end of the process: the thread %r in %s", thread.name, location)
    if not left:
        logger.warning("abandoned at the end of the process: an exit handler that took longer than %g s", GRACE_S)
    _leave(code)


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader is gone
            stream.flush()
    os._exit(code)
