"""The learning curve of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from polyturn.core.errors import ConfigError, DataError
from polyturn.tracking.jsonl import JsonlTracker
from polyturn.tracking.plot import curves, plot_learning_curve
from support.refusals import refuses


def metrics(folder: Path) -> Path:
    path = folder / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(0, {"eval/greedy/success": 0.3, "eval/sampled/success": 0.2})
    for step in range(1, 6):
        tracker.log(step, {"rollout/success": step / 10, "reward/mean": step / 5, "rollout/turns": 2.0})
    tracker.close()
    return path


def test_curve_is_a_png(tmp_path: Path) -> None:
    out = plot_learning_curve(metrics(tmp_path), tmp_path / "plots" / "curve.png", title="demo")
    assert out == tmp_path / "plots" / "curve.png"
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_each_evaluation_is_a_curve_with_gaps() -> None:
    steps = [
        {"step": 0, "eval/greedy/success": 0.3, "rollout/success": None},
        {"step": 1, "rollout/success": 0.4, "eval/greedy/success_rate": 9.0},
        {"step": 2, "eval/greedy/success": 0.5},
    ]
    assert curves(steps, "eval/*/success", "rollout/success") == {
        "eval/greedy/success": [(0, 0.3), (2, 0.5)],
        "rollout/success": [(1, 0.4)],
    }


def test_missing_metrics_and_matplotlib_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses(
        lambda: plot_learning_curve(tmp_path / "nothing.jsonl", tmp_path / "curve.png"),
        DataError,
        "has no steps",
        "nothing.jsonl",
    )
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="needs matplotlib, which is not installed; run: pip install"):
        plot_learning_curve(metrics(tmp_path), tmp_path / "curve.png")
