"""Labels and notes on trajectories, in a file in the run's folder: one line per change; the last one counts.

    {"id": "g5/2", "step": 12, "split": "train", "label": "reward hack", "note": "copies the test", "at": 1763846400.0}

It is the only file that the viewer writes. A line without label and note removes both.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from polyturn.core.errors import DataError, one_line
from polyturn.infra.contained import contained, read_contained

FILE = "labels.jsonl"
MAX_BYTES = 8 << 20
MAX_LABEL, MAX_NOTE = 60, 4000
_Key = tuple[str, int, str]


class Label(NamedTuple):
    """A user's label of a trajectory."""

    label: str
    note: str


class Labels:
    """The labels of one run."""

    def __init__(self, folder: Path) -> None:
        """Create the labels of the run in `folder`."""
        self.problem = ""
        """Why the last reading failed; empty if it succeeded."""
        self._folder = folder
        self._lock = threading.Lock()

    def read(self) -> dict[_Key, Label]:
        """Return the labels by (id, step, split); damaged lines are left out, or all lines if the file is damaged."""
        labels: dict[_Key, Label] = {}
        try:
            text, self.problem = read_contained(self._folder, FILE, max_bytes=MAX_BYTES) or "", ""
        except DataError as problem:
            text, self.problem = "", str(problem)
        for line in text.split("\n"):
            try:
                key, label = _parsed(json.loads(line))
            except (ValueError, RecursionError):
                continue
            labels.pop(key, None)
            if any(label):
                labels[key] = label
        return labels

    def write(self, value: Mapping[str, Any]) -> Label:
        """Append a line and return its label.

        Raises:
            DataError: the value is not a label, or cannot be written.
        """
        (id, step, split), label = _parsed(value)
        line = {"id": id, "step": step, "split": split, **label._asdict(), "at": round(time.time(), 3)}
        data = (json.dumps(line) + "\n").encode()
        with self._lock:
            try:
                path = contained(self._folder, FILE)  # a link out of the run is refused
                if path is not None and path.stat().st_size + len(data) > MAX_BYTES:
                    raise DataError(f"{FILE} has reached its limit of {MAX_BYTES >> 20} MB")
                descriptor = os.open(self._folder / FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
                with os.fdopen(descriptor, "ab+") as file:
                    is_whole = not file.seek(0, os.SEEK_END) or os.pread(descriptor, 1, file.tell() - 1) == b"\n"
                    file.write(data if is_whole else b"\n" + data)  # after a crash, only the incomplete line is lost
            except OSError as problem:
                raise DataError(f"{FILE} cannot be written: {one_line(problem)}") from problem
        return label


def known_labels(labels: Iterable[Label]) -> list[str]:
    """Return the distinct labels, sorted."""
    return sorted({one.label for one in labels if one.label})


def _parsed(value: Any) -> tuple[_Key, Label]:
    if not isinstance(value, Mapping):
        raise DataError("a label must be a JSON object")
    texts = {name: value.get(name, "") for name in ("id", "split", "label", "note")}
    step = value.get("step")
    if not all(isinstance(text, str) for text in texts.values()) or type(step) is not int or not 0 <= step < 2**53:
        raise DataError("a label needs texts `id`, `split`, `label` and `note`, and a whole number `step`")
    texts = {name: text.encode(errors="replace").decode().strip() for name, text in texts.items()}
    if len(texts["label"]) > MAX_LABEL or len(texts["note"]) > MAX_NOTE or max(map(len, texts.values())) > MAX_NOTE:
        raise DataError(f"a label may have {MAX_LABEL} characters and a note {MAX_NOTE}")
    return (texts["id"], step, texts["split"]), Label(texts["label"], texts["note"])
