"""`metrics.jsonl`: flushed line by line, valid JSON always, and continued by a resumed run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from polyturn.core.protocols import Tracker
from polyturn.infra.metrics_file import parse_line, parse_lines
from polyturn.tracking.jsonl import JsonlTracker, read_metrics


def test_line_is_flushed_at_once_and_holds_no_nan(tmp_path: Path) -> None:
    tracker: Tracker = JsonlTracker(tmp_path / "run" / "metrics.jsonl")
    tracker.log(0, {"a": 1.5, "b": math.nan, "c": -math.inf, "d": float(np.float32(2))})
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=lambda name: 1 / 0) == {"step": 0, "a": 1.5, "b": None, "c": None, "d": 2.0}
    tracker.close()


def test_resumed_run_drops_repeated_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonlTracker(path)
    for step in range(5):
        first.log(step, {"a": step})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 5, "a"')  # a crash
    second = JsonlTracker(path, resumed_step=2)
    second.log(3, {"a": 30})
    second.close()
    assert read_metrics(path) == [{"step": 0, "a": 0}, {"step": 1, "a": 1}, {"step": 2, "a": 2}, {"step": 3, "a": 30}]


def test_new_run_keeps_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for run in range(3):
        tracker = JsonlTracker(path)
        tracker.log(0, {"run": run})
        tracker.close()
    assert read_metrics(path)[0]["run"] == 2
    assert [read_metrics(tmp_path / f"metrics-{n}.jsonl")[0]["run"] for n in (1, 2)] == [0, 1]


def test_several_lines_of_one_step_are_read_as_one(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    tracker.log(1, {"a": 1})
    tracker.log(0, {"a": 0})
    tracker.log(1, {"b": 2})
    tracker.close()
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 0, "a": 0}, {"step": 1, "a": 1, "b": 2}]


def test_lines_parse_together_as_they_parse_alone() -> None:
    """Also if a line is damaged, has two objects, or begins an object that the next one ends."""
    good = [json.dumps({"step": s, "a": s / 7, "b": None}).encode() for s in range(600)]
    for bad in (
        b'{"step": 1}, {"step": 2}',
        b'{"step": 3',
        b"",
        b"\xff",
        b'{"step": 4, "\\ud800": 1}',
        b'{"step": 5, "a": NaN}',
    ):
        lines = [*good[:300], bad, *good[300:]]
        assert parse_lines(b"\n".join(lines)) == [parse_line(line) for line in lines], bad


def test_newest_steps_of_a_large_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "a": 1' + b" " * (64 << 20) + b'}\n{"step": 2, "a": 2}\n')
    assert read_metrics(path) == [{"step": 1, "a": 1}, {"step": 2, "a": 2}]
