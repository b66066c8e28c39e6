"""Determines from a run's folder whether the run is still running, and how far it has come.

lock held                               running, or silent if nothing has been written for a long time
lock free, with a recorded end          finished (at the last step, or the process ended normally), stopped (before the last
                                        step), or died (of an error)
lock free, without a recorded end       finished at the last step, else died: its process was killed on this machine
no lock, or another machine's lock      finished at the last step, else running or silent, by the time of the last line
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyturn.infra.folder_lock import FolderLock, read_lock
from polyturn.viewer.metric_file import MetricFile

SILENT_S = 300.0
"""Smallest number of seconds without a line after which an unfinished run is silent; ten times its longest recent step if
that is longer."""
NOTHING = {"state": "", "end": "", "last_step": None, "planned": 0, "silent_s": 0.0, "spent_s": 0.0, "written_at": 0.0}
"""The progress of a run that cannot be read."""


def planned_steps(config: Mapping[str, Any], section: str) -> int:
    """Return the number of steps of `train` or `warm_start` in a config; 0 if it is not set."""
    value = config.get(section)
    steps = value.get("steps") if isinstance(value, Mapping) and not value.get("epochs") else None
    return steps if type(steps) is int else 0


def progress(folder: Path, metrics: MetricFile, warm_start: MetricFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's progress, with the keys of `NOTHING`.

    Args:
        folder: The run's folder.
        metrics: The run's metrics read so far.
        warm_start: The metrics of its warm start.
        config: The run's configuration; parts may be missing or invalid.
    """
    last_step = max((line["step"] for line in metrics.lines), default=None)
    warm_step = max((line["step"] for line in warm_start.lines), default=0)
    section, reached = ("warm_start", warm_step) if last_step is None else ("train", last_step)
    planned = planned_steps(config, section)
    spent = [min(max(s, 0.0), 2.0**53) for line in metrics.lines if (s := line.get("time/step_s"))]
    written = max(metrics.written_at, warm_start.written_at)
    silent = time.time() - written if written else 0.0
    state, end = _state(read_lock(folder), is_at_end=0 < planned <= reached, has_plan=planned > 0, is_begun=written > 0)
    if state == "running" and silent > max(SILENT_S, 10 * max(spent[-9:], default=0.0)):
        state = "silent"
    return {
        "state": state,
        "end": end,
        "last_step": last_step,
        "planned": planned_steps(config, "train"),
        "silent_s": silent,
        "spent_s": sum(spent),
        "written_at": written,
    }


def _state(lock: FolderLock | None, *, is_at_end: bool, has_plan: bool, is_begun: bool) -> tuple[str, str]:
    """Return the state, and the reason if the run died."""
    if lock is not None and lock.is_held:
        return "running", ""
    if is_at_end:
        return "finished", ""
    if lock is not None and lock.end is not None:
        if lock.end and not lock.end.startswith("KeyboardInterrupt"):
            return "died", lock.end
        return ("stopped" if lock.end or has_plan else "finished"), ""
    if lock is not None and lock.is_ours:
        return "died", "its process was killed, or ended without a reason"
    return ("running" if is_begun else ""), ""
