"""The viewer reads a growing file of metrics, of which only the newest part is in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyturn.viewer import metric_file
from polyturn.viewer.metric_file import MetricFile


def test_large_file_shows_its_newest_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {step}}}\n' for step in range(100, 200)]  # 14 bytes each
    monkeypatch.setattr(metric_file, "MAX_BYTES", 300)
    metrics = MetricFile(tmp_path, path.name)
    for last in (10, 30, 40, 41, 90, 100):
        path.write_text("".join(lines[:last]))
        metrics.refresh()
        steps = [line["step"] for line in metrics.lines]
        assert steps == list(range(100 + last - len(steps), 100 + last)) and len(steps) <= 42
        assert len(steps) == last or f"has {14 * last} bytes; only the newest" in " ".join(metrics.problems())
        assert len(steps) == last or len(steps) >= 20
