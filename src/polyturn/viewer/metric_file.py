"""Reads a file of metrics while a run writes it: all complete lines so far, and the problems in them.

{"step": 12, "reward/mean": 0.5}\n{"step": 13, "rew       ->  one line now, the next one when it is complete
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import orjson

from polyturn.core.errors import DataError
from polyturn.infra.contained import contained
from polyturn.infra.metrics_file import parse_lines

MAX_BYTES = 64 << 20
"""The most bytes of a file that are read at first: the newest ones. The lines in memory have at most twice as many."""

MAX_NAME = 1000
"""Largest number of characters of a metric's name in an address and on a page."""


class MetricFile:
    """A growing file of metrics."""

    def __init__(self, folder: Path, name: str) -> None:
        """Create a reader; `refresh` reads the file."""
        self.lines: list[dict[str, Any]] = []
        self.names: dict[str, None] = {}
        """The names with a number in any line, in order of appearance."""
        self._long_names: set[str] = set()  # prefixes of names that are too long
        self.problem = ""
        self.is_there = True  # assumed until the first refresh
        self.written_at = 0.0
        """Time of the last write, in seconds since the epoch."""
        self._folder, self._name = folder, name
        self._lock = threading.Lock()
        self._read_from = self._read_to = self._bad_lines = self._file = 0

    def refresh(self) -> None:
        """Read the lines that have been completed since the last call; each line once, also if several threads call it."""
        with self._lock:
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
        # A resumed run removes the steps that it repeats. A file that has grown much is read from a later line on.
        if size < self._read_to or about.st_ino != self._file or size - self._read_from > 2 * MAX_BYTES:
            self.lines, self.names, self._long_names, self._bad_lines, self._file = [], {}, set(), 0, about.st_ino
            self._read_from = self._read_to = max(0, size - MAX_BYTES)
        with path.open("rb") as file:
            file.seek(self._read_to)
            if 0 < self._read_from == self._read_to:
                self._read_to += len(file.readline(size - self._read_to))  # the rest of a line that began earlier
            new = file.read(size - self._read_to)
        if self._read_from:
            self.problem = f"{self._name} has {size} bytes; only the newest {size - self._read_from} are shown"
        whole = new[: new.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for values in parse_lines(whole, loads=orjson.loads):  # parsing takes nine tenths of the time of a page of curves
            if values is None:
                self._bad_lines += 1
                continue
            self.lines.append(values)
            if not values.keys() <= self.names.keys():
                self.names.update(dict.fromkeys(name for name in values if len(name) <= MAX_NAME))
                self._long_names.update(name[:40] for name in values if len(name) > MAX_NAME)

    def steps(self) -> list[dict[str, Any]]:
        """Return one dict per step, in order, with the lines of a step merged."""
        steps: dict[int, dict[str, Any]] = {}
        for line in self.lines:
            steps.setdefault(line["step"], {}).update(line)
        return [steps[step] for step in sorted(steps)]

    def problems(self) -> list[str]:
        """Return one sentence per problem in the file."""
        damaged = f"{self._bad_lines} lines of {self._name} are damaged and were skipped" if self._bad_lines else ""
        first = f"the first begins with {min(self._long_names)!r}" if self._long_names else ""
        long = f"{self._name} has names of more than {MAX_NAME} characters, which are not shown; {first}" if first else ""
        return [text for text in (self.problem, damaged, long) if text]
