"""Curves of runs as pictures, drawn from their `metrics.jsonl`: the learning curve of one, or metrics of several.

Separate because only this file needs matplotlib, which is imported when it is called and never opens a window.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from polyturn.core.errors import ConfigError, DataError, did_you_mean
from polyturn.tracking.jsonl import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class _Panel(NamedTuple):
    title: str
    names: tuple[str, ...]
    """Metrics; the part that `*` stands for is the curve's label."""


_PANELS = (
    _Panel("success", ("eval/*/success", "rollout/success")),
    _Panel("reward", ("eval/*/mean_reward", "reward/mean")),
    _Panel("turns per episode", ("eval/*/mean_turns", "rollout/turns")),
    _Panel("entropy per token (nats)", ("policy/entropy",)),
)


def plot_learning_curve(metrics: Path, out: Path, *, title: str = "") -> Path:
    """Draw success, reward, turns and entropy over the steps.

    Args:
        metrics: The `metrics.jsonl` of a run.
        out: The PNG to write.
        title: Written above the panels.

    Returns:
        `out`.

    Raises:
        ConfigError: matplotlib is not installed.
        DataError: the metrics are missing, or hold no step.
    """
    figure_of, canvas = _matplotlib()
    steps = read_metrics(metrics)
    if not steps:
        raise DataError(f"there is no step in {metrics}; a learning curve needs a run that logged at least one")
    figure = figure_of(figsize=(11, 7), layout="constrained")
    canvas(figure)
    for axes, panel in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        _draw(axes, panel, steps)
    if title:
        figure.suptitle(title)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110, format="png")
    return out


def plot_metrics(runs: Sequence[Path], metrics: Sequence[str], out: Path) -> Path:
    """Draw a panel for each metric, with a curve for each run.

    Args:
        runs: Folders of runs.
        metrics: Names of metrics, in which * stands for any part; none draws success and reward.
        out: The picture, in the format that its ending names.

    Returns:
        `out`.

    Raises:
        ConfigError: matplotlib is not installed, or does not know the ending.
        DataError: a run has no metrics, or no run has one of these.
    """
    figure_of, canvas = _matplotlib()
    steps_of: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        path = run / "metrics.jsonl"
        steps = read_metrics(path)
        if not steps:
            raise DataError(f"there is no step in {path}; a curve needs a run that logged at least one")
        steps_of[str(run) if run.resolve().name in steps_of else run.resolve().name] = steps
    known = sorted({key for steps in steps_of.values() for step in steps for key in step} - {"step"})
    patterns = list(metrics) or [p for p in ("eval/*/success", "rollout/success", "reward/mean") if _matching(p, known)]
    for pattern in patterns:
        if not _matching(pattern, known):
            raise DataError(f"no run has the metric {pattern!r}.{did_you_mean(pattern, known)}")
    figure = figure_of(figsize=(9, 3.4 * len(patterns) + 0.4), layout="constrained")
    canvas(figure)
    for axes, pattern in zip(figure.subplots(len(patterns), 1, squeeze=False).flat, patterns, strict=True):
        for run_name, steps in steps_of.items():
            for name in _matching(pattern, known):
                points = [(s["step"], s[name]) for s in steps if s.get(name) is not None]
                label = " ".join([run_name] * (len(steps_of) > 1) + [name] * ("*" in pattern)) or name
                if points:
                    axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 30 else None, ms=3, label=label)
        axes.set_title(pattern)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(out, dpi=110)
    except ValueError as problem:
        raise ConfigError(f"the picture cannot be written to {out} ({problem}); name a .png, .svg or .pdf file") from problem
    return out


def _matching(pattern: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def _matplotlib() -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("drawing needs matplotlib, which is not installed; run: pip install 'polyturn[train]'") from error
    return Figure, FigureCanvasAgg


def curves(steps: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, list[tuple[int, float]]]:
    """Return the points of each metric that `names` match: {"eval greedy": [(0, 0.31), (10, 0.5)], "training": [...]}."""
    points: dict[str, list[tuple[int, float]]] = {}
    for name in names:
        head, star, tail = name.partition("*")
        for step in steps:
            for key, value in step.items():
                is_match = key.startswith(head) and key.endswith(tail) and len(key) > len(name) - 1 if star else key == name
                if is_match and value is not None:
                    label = f"eval {key[len(head) : len(key) - len(tail)]}" if star else "training"
                    points.setdefault(label, []).append((step["step"], value))
    return points


def _draw(axes: Axes, panel: _Panel, steps: list[dict[str, Any]]) -> None:
    points_by_name = curves(steps, panel.names)
    for label, points in points_by_name.items():
        is_eval = label.startswith("eval")
        axes.plot(*zip(*points, strict=True), marker="o" if is_eval else None, linewidth=2 if is_eval else 1, label=label)
    axes.set_title(panel.title)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if points_by_name:
        axes.legend()
    else:
        axes.text(0.5, 0.5, "not recorded", ha="center", va="center", transform=axes.transAxes, color="grey")
    if panel.title == "success":
        axes.set_ylim(-0.02, 1.02)
