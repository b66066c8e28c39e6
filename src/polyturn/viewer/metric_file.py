"""A file of metrics that is read while a run writes it: all complete lines so far, and the problems in them.

    {"step": 12, "reward/mean": 0.5}\n{"step": 13, "rew       ->  one line now, the next one once it is complete

Separate from the run, because a warm start has a file of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from polyturn.core.contained import contained
from polyturn.core.errors import DataError
from polyturn.core.metrics_file import MAX_BYTES, parse_lines

MAX_NAME = 1000
"""Characters that the name of a metric may have in an address and on a page."""


class MetricFile:
    """A file of metrics that grows while it is read."""

    def __init__(self, folder: Path, name: str) -> None:
        """Name the file; `refresh` reads it."""
        self.lines: list[dict[str, Any]] = []
        self.names: dict[str, None] = {}
        """The names with a number in any line, in the order in which they came."""
        self._long_names: set[str] = set()  # their beginnings
        self.problem = ""
        self.is_there = True  # until it has been looked for
        self.written_at = 0.0
        """Seconds of the clock at which it was last written."""
        self._folder, self._name = folder, name
        self._read_to = self._bad_lines = self._file = 0

    def refresh(self) -> None:
        """Read the lines that are complete by now."""
        try:
            self._refresh()
        except (DataError, OSError) as problem:
            self.problem = str(problem)

    def _refresh(self) -> None:
        path = contained(self._folder, self._name)
        self.problem, self.is_there = "", path is not None
        if path is None:
            return
        about = path.stat()
        size, self.written_at = about.st_size, about.st_mtime
        if size < self._read_to or about.st_ino != self._file:  # a resumed run drops the steps that it takes again
            self.lines, self.names, self._read_to, self._bad_lines, self._file = [], {}, 0, 0, about.st_ino
            self._long_names = set()
        with path.open("rb") as file:
            file.seek(self._read_to)
            new = file.read(max(0, MAX_BYTES - self._read_to))
        if size > MAX_BYTES:
            self.problem = f"{self._name} has {size} bytes, and only the first {MAX_BYTES} are shown"
        whole = new[: new.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for values in parse_lines(whole, loads=orjson.loads):  # nine tenths of a page of curves are parsing
            if values is None:
                self._bad_lines += 1
                continue
            self.lines.append(values)
            if not values.keys() <= self.names.keys():
                self.names.update(dict.fromkeys(name for name in values if len(name) <= MAX_NAME))
                self._long_names.update(name[:40] for name in values if len(name) > MAX_NAME)

    def steps(self) -> list[dict[str, Any]]:
        """Return one dict a step, in order: the lines of one step joined."""
        steps: dict[int, dict[str, Any]] = {}
        for line in self.lines:
            steps.setdefault(line["step"], {}).update(line)
        return [steps[step] for step in sorted(steps)]

    def problems(self) -> list[str]:
        """Return a sentence for each unreadable part of the file."""
        damaged = f"{self._bad_lines} lines of {self._name} are damaged and were skipped" if self._bad_lines else ""
        first = f"the first begins with {min(self._long_names)!r}" if self._long_names else ""
        long = f"{self._name} has names of more than {MAX_NAME} characters, which are not shown; {first}" if first else ""
        return [text for text in (self.problem, damaged, long) if text]
