"""The end of a process of the command line, whatever threads and exit handlers plug-ins began.

Python ends a process only after every thread that is not a daemon, and after every exit handler. Here both have a limit.
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
from typing import NoReturn

from polyturn.core.code_origin import place_of

logger = logging.getLogger(__name__)

GRACE_S = 4.0
"""Seconds that threads and exit handlers may take once a command is done."""


def end_process(run: Callable[[], object]) -> NoReturn:
    """Call `run`, and end the process with its exit code, as Python would; threads of plug-ins do not keep it.

    What Python does at its end is done here with a limit: threads are waited for, then exit handlers are called. Objects
    are not taken down one by one, so that no code of a plug-in runs again.
    """
    code = _call(run)
    threading.Thread(target=_end_anyway, args=(code,), name="polyturn-end", daemon=True).start()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _flush()
    os._exit(code)


def _call(run: Callable[[], object]) -> int:
    try:
        run()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end_anyway(code: int) -> None:
    """Run in a thread: end the process although something keeps it."""
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
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader is gone
            stream.flush()
