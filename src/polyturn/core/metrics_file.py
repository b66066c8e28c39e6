"""`metrics.jsonl`, read: one dict a step, whatever was written twice, cut off by a crash, or put there by somebody else.

    {"step": 12, "rollout/success": 0.52, "loss/total": null}
    {"step": 12, "eval/greedy/success": 0.6}      ->   one step with all four

Separate from what writes it (`tracking/jsonl.py`): a stored run is read where nothing is tracked.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from polyturn.core.contained import contained
from polyturn.core.errors import DataError, one_line


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return one dict a step, in order: the lines of one step joined, damaged lines and half a last one left out.

    Raises:
        DataError: the file is a link that leads out of its folder, or cannot be read.
    """
    steps: dict[int, dict[str, Any]] = {}
    for line in metric_lines(path, max_bytes=MAX_BYTES):
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


def metric_lines(path: Path, *, max_bytes: int = -1) -> list[dict[str, Any]]:
    """Return the lines of a file of metrics in its order, damaged ones left out.

    Raises:
        DataError: the file cannot be read.
    """
    place = contained(path.parent, path.name)
    if place is None:
        return []
    try:
        with place.open("rb") as file:
            data = file.read(max_bytes)
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {one_line(problem)}") from problem
    return [line for text in data.splitlines() if (line := parse_line(text)) is not None]
