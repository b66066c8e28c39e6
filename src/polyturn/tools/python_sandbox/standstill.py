"""Between two calls a sandbox stands still: what a call left running goes on with the next one, and not before.

    call 1 starts a thread, a daemon      ->  both stop with the end of the call
    call 2                                ->  both go on for as long as it runs

Every process below the sandbox's first one is stopped from outside, by a signal that none can catch or block. A process of
one thread does nothing more once the signal is on its way; of one with several, another thread may fork meanwhile, so it
is waited for. What cannot be made to stand still, because it forks faster than it can be counted, is the caller's to kill.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

LIMIT_S = 2.0
"""How long the processes of a sandbox may take to stand still."""
_PAUSE_S = 0.0002
_STILL = "TtZXx"
"""States of a process that does not run: stopped, traced, dead."""


def stand_still(first: int) -> bool:
    """Stop a process and all below it; False if they do not stand still in time."""
    until, pause_s, told = time.monotonic() + LIMIT_S, _PAUSE_S, set[int]()
    while True:
        found = _below(first)
        for pid in found.keys() - told:
            _signal(pid, found, signal.SIGSTOP)
            told.add(pid)
        if told == found.keys() and all(_has_one_thread(pid) or _stat(pid)[0] in _STILL for pid in found):
            if _below(first).keys() <= told:
                return True
            continue
        if time.monotonic() > until:
            return False
        told &= found.keys()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)


def go_on(first: int) -> None:
    """Let a process and all below it go on."""
    found = _below(first)
    for pid in found:
        _signal(pid, found, signal.SIGCONT)


def _below(first: int) -> Mapping[int, int]:
    """Return a process and all below it, each with its parent."""
    found, todo = {first: 0}, [first]
    while todo:
        parent = todo.pop()
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                with contextlib.suppress(OSError):
                    for pid in map(int, (task / "children").read_text().split()):
                        if pid not in found:
                            found[pid] = parent
                            todo.append(pid)
    return found


def _signal(pid: int, found: Mapping[int, int], number: signal.Signals) -> None:
    """Send a signal to a process, unless its number is another's by now."""
    with contextlib.suppress(OSError):
        held = os.pidfd_open(pid)
        try:
            if not found[pid] or _stat(pid)[1] in found:
                signal.pidfd_send_signal(held, number)
        finally:
            os.close(held)


def _has_one_thread(pid: int) -> bool:
    try:
        return len(os.listdir(f"/proc/{pid}/task")) == 1
    except OSError:
        return True


def _stat(pid: int) -> tuple[str, int]:
    """Return a process's state and its parent; that of one that is gone is X."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return "X", 0
    return state, int(parent)
