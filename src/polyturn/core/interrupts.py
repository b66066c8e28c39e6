"""Tells a KeyboardInterrupt of a person, which ends the run, from one that a plug-in raises, which is a failure of its code.

    Ctrl-C while a plug-in runs             SIGINT raises it, between two instructions     the run ends
    raise KeyboardInterrupt in a plug-in    a statement raises it                          the plug-in failed

SystemExit is treated alike: `sys.exit()` in a plug-in does not end the run.
"""

from __future__ import annotations

import dis
import traceback
from types import FrameType, TracebackType

from polyturn.core.code_origin import is_an_authors

PLUGIN_RAISES = (Exception, SystemExit, KeyboardInterrupt)
"""The exceptions to catch around a plug-in's code; call `pass_interrupt` first in the `except` block."""
_RAISE = dis.opmap["RAISE_VARARGS"]


def is_interrupt(problem: BaseException) -> bool:
    """Return whether a signal raised this KeyboardInterrupt: the traceback ends in a signal handler or outside a `raise`."""
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
    """Re-raise an exception that a signal raised; do nothing for an exception of a plug-in."""
    if is_interrupt(problem):
        raise problem


def ends_for_a_plugin(problem: BaseException) -> bool:
    """Return whether this SystemExit or KeyboardInterrupt comes from a plug-in's code, not from the user."""
    frames = traceback.walk_tb(problem.__traceback__)
    return not is_interrupt(problem) and any(is_an_authors(frame.f_code.co_filename) for frame, _ in frames)


def _handles_signal(frame: FrameType) -> bool:
    """Return whether a frame is a signal handler: one of its arguments is the interrupted frame, also its caller."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount]
    return frame.f_back is not None and any(frame.f_locals.get(name) is frame.f_back for name in names)
