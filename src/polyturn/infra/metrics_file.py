"""Reads `metrics.jsonl`: one dict per step, even if lines were written twice, cut off by a crash, or damaged.

    {"step": 12, "rollout/success": 0.52, "loss/total": null}
    {"step": 12, "eval/greedy/success": 0.6}      ->   one step with all four

Separate from the writer (`tracking/jsonl.py`), because commands and the viewer read stored runs without tracking anything.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from polyturn.core.errors import DataError, one_line
from polyturn.infra.contained import contained


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return one dict per step, in order. Lines of the same step are merged; damaged or incomplete lines are skipped.

    Raises:
        DataError: the file is a link that leads out of its folder, or cannot be read.
    """
    steps: dict[int, dict[str, Any]] = {}
    for line in metric_lines(path):
        steps.setdefault(line["step"], {}).update(line)
    return [steps[step] for step in sorted(steps)]


_TOGETHER = 256
"""Number of lines parsed in one call, so that they share the strings of their names. If that fails, each line is parsed
separately."""

_READ_BYTES = 1 << 20
"""About the number of bytes of a file that are in memory at a time, beside the parsed lines."""


def parse_lines(data: bytes, *, loads: Callable[[bytes], Any] = json.loads) -> list[dict[str, Any] | None]:
    """Return the result of `parse_line` for each line of a file; `loads` may be a stricter JSON parser than Python's."""
    lines, rows = data.splitlines(), []
    for start in range(0, len(lines), _TOGETHER):
        some = lines[start : start + _TOGETHER]
        try:
            read = loads(b"[" + b",".join(some) + b"]")
        except (ValueError, RecursionError):
            read = []
        rows += [_numbers(line) for line in read] if len(read) == len(some) else [parse_line(line) for line in some]
    return rows


def parse_line(text: str | bytes) -> dict[str, Any] | None:
    """Parse one line of metrics; null and values that are not finite become None. An invalid line gives None.

    A valid line is an object with a whole number `step`, and a number or null under every other name.
    """
    try:
        return _numbers(json.loads(text))
    except (ValueError, RecursionError):
        return None  # cut off by a crash, or no JSON


def _numbers(line: Any) -> dict[str, Any] | None:
    if not isinstance(line, dict) or type(line.get("step")) is not int or not 0 <= line["step"] < 2**53:
        return None
    kinds = set(map(type, line.values()))
    if not kinds <= {int, float, type(None)} or not _is_text("".join(line)):
        return None
    if max(abs(value) for value in line.values() if type(value) is int) > sys.float_info.max:
        return None  # an integer that does not fit into a float
    if type(None) not in kinds and all(map(math.isfinite, line.values())):
        return line
    return {name: None if value is None or not math.isfinite(value) else value for name, value in line.items()}


def _is_text(name: str) -> bool:
    """Return whether a name can be encoded as UTF-8, that is, has no lone surrogate."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def metric_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the valid lines of a metrics file, in order.

    Raises:
        DataError: the file cannot be read.
    """
    metrics_path = contained(path.parent, path.name)
    if metrics_path is None:
        return
    try:
        with metrics_path.open("rb") as file:
            while lines := file.readlines(_READ_BYTES):
                yield from (line for line in parse_lines(b"".join(lines)) if line is not None)
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {one_line(problem)}") from problem
