"""`metrics.jsonl`: the numbers of a run, written down as they come and readable by anything.

    {"step": 12, "rollout/success": 0.52, "policy/entropy": 1.31, "loss/total": null}

Separate because it is always on, whatever else records a run. A line is flushed when it is written, so a crash costs at
most half a line; numbers that are not finite become null, which every JSON reader accepts.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyturn.core.contained import contained
from polyturn.core.errors import DataError, one_line


class JsonlTracker:
    """Appends one line for every `log`."""

    def __init__(self, path: Path, *, resumed_step: int | None = None) -> None:
        """Open `path`.

        Args:
            path: The file; its folder is made.
            resumed_step: The step that a resumed run goes on from: later steps in the file are dropped, because they are
                taken again. None starts a new file; one that is there already is kept under another name.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if resumed_step is None:
                _set_aside(path)
            else:
                _keep_until(path, resumed_step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of one step; several calls for one step are several lines, which `read_metrics` joins."""
        line = {"step": step, **{name: _finite(value) for name, value in values.items()}}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return one dict a step, in order: the lines of one step joined, damaged lines and half a last one left out.

    Raises:
        DataError: the file is a link that leads out of its folder, or cannot be read.
    """
    steps: dict[int, dict[str, Any]] = {}
    for line in _lines(path, max_bytes=MAX_BYTES):
        steps.setdefault(line["step"], {}).update(line)
    return [steps[step] for step in sorted(steps)]


MAX_BYTES = 64 << 20
"""Bytes of a run's metrics that are read; the lines after them are not shown."""


def parse_line(text: str | bytes) -> dict[str, Any] | None:
    """Return the numbers of one line, null and what is not finite as None; None for what is no such line.

    A line is an object with a whole number `step`, and a number or null under every other name.
    """
    try:
        line = json.loads(text)
        "".join(line).encode()  # a name that no page and no file can hold
    except (ValueError, TypeError, RecursionError):
        return None  # half a line, from a crash, or something else altogether
    if not isinstance(line, dict) or type(line.get("step")) is not int or not 0 <= line["step"] < 2**53:
        return None
    if not all(value is None or type(value) in (int, float) for value in line.values()):
        return None
    if any(type(value) is int and abs(value) > sys.float_info.max for value in line.values()):
        return None  # a number that no float can hold
    return {name: None if value is None or not math.isfinite(value) else value for name, value in line.items()}


def _lines(path: Path, *, max_bytes: int = -1) -> list[dict[str, Any]]:
    place = contained(path.parent, path.name)
    if place is None:
        return []
    try:
        with place.open("rb") as file:
            data = file.read(max_bytes)
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {one_line(problem)}") from problem
    return [line for text in data.splitlines() if (line := parse_line(text)) is not None]


def _keep_until(path: Path, step: int) -> None:
    kept = [line for line in _lines(path) if line["step"] <= step]
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
