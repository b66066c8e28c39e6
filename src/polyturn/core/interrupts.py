"""Origin of a KeyboardInterrupt: a person's, which ends the run, or a plug-in's, whose code failed.

    Ctrl-C while a plug-in runs             SIGINT raises it, between two instructions     the run ends
    raise KeyboardInterrupt in a plug-in    a statement raises it                          the plug-in failed

SystemExit is the same: `sys.exit()` in a plug-in does not end the run. Separate from `errors.py`, which is about messages.
"""

from __future__ import annotations

import dis
import traceback
from types import FrameType, TracebackType

from polyturn.core.code_origin import is_an_authors

PLUGIN_RAISES = (Exception, SystemExit, KeyboardInterrupt)
"""The exceptions that `except` names around a plug-in's code; `pass_interrupt` first, in the block."""
_RAISE = dis.opmap["RAISE_VARARGS"]


def is_interrupt(problem: BaseException) -> bool:
    """Return whether a signal raised this KeyboardInterrupt: no statement did, or one in a handler of the signal."""
    if type(problem) is not KeyboardInterrupt:
        return False
    trace: TracebackType | None = problem.__traceback__
    is_raised = False
    while trace is not None:
        frame = trace.tb_frame
        if _handles_signal(frame):
            return True
        is_raised = frame.f_code.co_code[trace.tb_lasti] == _RAISE  # the innermost frame decides
        trace = trace.tb_next
    return not is_raised


def pass_interrupt(problem: BaseException) -> None:
    """Raise what a signal raised again; return for what a plug-in raised."""
    if is_interrupt(problem):
        raise problem


def ends_for_a_plugin(problem: BaseException) -> bool:
    """Return whether a plug-in's code raised this SystemExit or KeyboardInterrupt, so that it is not a user's interrupt."""
    frames = traceback.walk_tb(problem.__traceback__)
    return not is_interrupt(problem) and any(is_an_authors(frame.f_code.co_filename) for frame, _ in frames)


def _handles_signal(frame: FrameType) -> bool:
    """Return whether it is a signal handler, which is given the frame that it interrupts, and returns to."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount]
    return frame.f_back is not None and any(frame.f_locals.get(name) is frame.f_back for name in names)
