"""Stops all processes of a sandbox between two calls; processes that a call left running continue during the next call.

    call 1 starts a thread and a process  ->  both are stopped at the end of the call
    call 2                                ->  both continue while call 2 runs

Every descendant of the sandbox's first process is stopped from outside, by SIGSTOP, which cannot be caught or blocked. A
process with one thread stops as soon as the signal is sent. In a process with several threads, another thread may still
fork, so `stand_still` waits until the process has stopped. Processes inside cannot continue a stopped one (`seccomp.py`). If
the kernel continues an orphaned process group, it is stopped again. The caller kills processes that cannot be stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

LIMIT_S = 2.0
"""Seconds that the processes of a sandbox may take to stop."""
_PAUSE_S = 0.0002
_STILL = "TtZXx"
"""States of a process that is not running: stopped, traced, dead."""


def stand_still(first: int) -> bool:
    """Stop a process and its descendants; return whether all stopped in time."""
    until, pause_s, num_still = time.monotonic() + LIMIT_S, 0.0, 0
    while num_still < 2:  # twice, because the end of a process may have let another one continue after its check
        processes = _below(first)
        moving = [pid for pid in processes if not _is_still(pid)]
        for pid in moving:
            _signal(pid, processes, signal.SIGSTOP)
        num_still = 0 if moving else num_still + 1
        if time.monotonic() > until:
            return False
        if moving:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s or _PAUSE_S, 0.02)
    return True


def go_on(first: int) -> None:
    """Let a process and its descendants continue."""
    processes = _below(first)
    for pid in processes:
        _signal(pid, processes, signal.SIGCONT)


def _below(first: int) -> Mapping[int, int]:
    """Return a process and its descendants: process id -> id of the parent."""
    depths, todo = {first: 0}, [first]
    while todo:
        parent = todo.pop()
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                with contextlib.suppress(OSError):
                    for pid in map(int, (task / "children").read_text().split()):
                        if pid not in depths:
                            depths[pid] = parent
                            todo.append(pid)
    return depths


def _signal(pid: int, processes: Mapping[int, int], number: signal.Signals) -> None:
    """Send a signal to a process, unless its id has been reused."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if not processes[pid] or _stat(pid)[1] in processes:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def _is_still(pid: int) -> bool:
    """Return whether a process is stopped or gone, or has a single thread with a pending stop signal."""
    try:
        fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    except OSError:
        return True
    has_stop_pending = int(fields["ShdPnd"], 16) >> (signal.SIGSTOP - 1) & 1
    return fields["State"][0] in _STILL or (fields["Threads"].strip() == "1" and bool(has_stop_pending))


def _stat(pid: int) -> tuple[str, int]:
    """Return a process's state and its parent; the state of a process that is gone is X."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return "X", 0
    return state, int(parent)
