"""Writes `metrics.jsonl`, the metrics of a run.

    {"step": 12, "rollout/success": 0.52, "policy/entropy": 1.31, "loss/total": null}

This tracker is always on. Each line is flushed, so a crash loses at most the last line. Numbers that are not finite become
null, which every JSON reader accepts.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from polyturn.infra.metrics_file import metric_lines
from polyturn.infra.metrics_file import parse_line as parse_line
from polyturn.infra.metrics_file import read_metrics as read_metrics


class JsonlTracker:
    """Appends one line per `log` call."""

    def __init__(self, path: Path, *, resumed_step: int | None = None) -> None:
        """Open `path`.

        Args:
            path: The file; its folder is created if missing.
            resumed_step: The step after which a resumed run continues; later steps are removed from the file, because the
                run repeats them. None starts a new file and renames an existing one.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if resumed_step is None:
                _set_aside(path)
            else:
                _keep_until(path, resumed_step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of a step. Several calls for one step write several lines, which `read_metrics` merges."""
        line = {"step": step, **{name: _finite(value) for name, value in values.items()}}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _keep_until(path: Path, step: int) -> None:
    kept = [line for line in metric_lines(path) if line["step"] <= step]
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    os.replace(temporary, path)


def _set_aside(path: Path) -> None:
    number = 1
    while (older := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    os.replace(path, older)


def _finite(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
