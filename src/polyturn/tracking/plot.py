"""Draws pictures from `metrics.jsonl`: the learning curve of one run, or metrics of several runs.

matplotlib is imported on use, and never opens a window.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.core.errors import ConfigError, DataError, did_you_mean
from polyturn.tracking.jsonl import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

logger = logging.getLogger(__name__)

_PANELS = {
    "success": ("eval/*/success", "rollout/success"),
    "reward": ("eval/*/mean_reward", "reward/mean"),
    "turns per episode": ("eval/*/mean_turns", "rollout/turns"),
    "entropy per token (nats)": ("policy/entropy",),
}
"""Panel of a learning curve -> its metrics; * stands for any part."""
MAX_MARKED = 30
"""Largest number of points of a curve with markers."""
Curves = Mapping[str, list[tuple[int, float]]]
"""Name -> (step, value)."""
Steps = Sequence[Mapping[str, Any]]


def plot_learning_curve(metrics: Path, out: Path, *, title: str = "") -> Path:
    """Draw success, reward, turns and entropy over the steps.

    Args:
        metrics: The `metrics.jsonl` of a run.
        out: The PNG to write.
        title: The title above the panels.

    Returns:
        `out`.

    Raises:
        ConfigError: matplotlib is not installed.
        DataError: the metrics are missing, or have no step.
    """
    steps = _steps(metrics)
    figure = _figure((11, 7))
    for axes, (name, patterns) in zip(figure.subplots(2, 2).flat, _PANELS.items(), strict=True):
        by_name = curves(steps, *patterns)
        labels = {key: f"eval {key.split('/')[1]}" if key.startswith("eval/") else "training" for key in by_name}
        _draw(axes, name, {labels[key]: points for key, points in by_name.items()})
        if name == "success":
            axes.set_ylim(-0.02, 1.02)
    if title:
        figure.suptitle(title)
    return _save(figure, out)


def plot_metrics(runs: Sequence[Path], metrics: Sequence[str], out: Path) -> Path:
    """Draw one panel per metric, with a curve per run.

    Args:
        runs: Folders of runs.
        metrics: Names of metrics; * matches any part.
        out: The picture; the ending determines its format.

    Returns:
        `out`.

    Raises:
        ConfigError: matplotlib is not installed, or does not support the ending.
        DataError: a folder is missing, or no run has one of the named metrics.
    """
    figure = _figure((9, 3.4 * len(metrics) + 0.4))
    steps_of: dict[str, Steps] = {}
    for run in runs:
        if not run.is_dir():
            raise DataError(f"there is no folder {str(run)!r}; use a run's folder")
        if lines := read_metrics(run / "metrics.jsonl"):
            steps_of[str(run) if run.resolve().name in steps_of else run.resolve().name] = lines
        else:
            logger.warning("%s has no metrics of steps, so it has no curve", run)
    if not steps_of:
        raise DataError(f"there are no metrics of steps in {', '.join(map(str, runs))}; a curve needs at least one")
    for axes, pattern in zip(figure.subplots(len(metrics), 1, squeeze=False).flat, metrics, strict=True):
        panel: dict[str, list[tuple[int, float]]] = {}
        for run_name, steps in steps_of.items():
            for name, points in curves(steps, pattern).items():
                label = " ".join([run_name] * (len(steps_of) > 1) + [name] * ("*" in pattern)) or name
                panel[label] = points
        if not panel:
            known = {name for steps in steps_of.values() for name in curves(steps, "*")}
            raise DataError(f"no run has a value of the metric {pattern!r}.{did_you_mean(pattern, known)}")
        _draw(axes, pattern, panel)
    return _save(figure, out)


def curves(steps: Steps, *patterns: str) -> Curves:
    """Return the points of each matching metric: {"eval/greedy/success": [(0, 0.31), (10, 0.5)], …}."""
    names = sorted({name for step in steps for name, value in step.items() if value is not None} - {"step"})
    matching = [name for pattern in patterns for name in names if fnmatch.fnmatchcase(name, pattern)]
    return {name: [(step["step"], step[name]) for step in steps if step.get(name) is not None] for name in matching}


def _steps(path: Path) -> Steps:
    if not (steps := read_metrics(path)):
        raise DataError(f"{path} has no steps; a curve needs a run that logged at least one")
    return steps


def _figure(size: tuple[float, float]) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("drawing needs matplotlib, which is not installed; run: pip install 'polyturn[train]'") from error
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw(axes: Axes, title: str, curves_by_label: Curves) -> None:
    for label, points in curves_by_label.items():
        marker, width = "o" if len(points) < MAX_MARKED else None, 2 if label.startswith("eval") else 1
        axes.plot(*zip(*points, strict=True), marker=marker, markersize=3, linewidth=width, label=label)
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if curves_by_label:
        axes.legend()
    else:
        axes.text(0.5, 0.5, "not recorded", ha="center", va="center", transform=axes.transAxes, color="grey")


def _save(figure: Any, out: Path) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(out, dpi=110)
    except ValueError as problem:
        raise ConfigError(f"the picture cannot be written to {out} ({problem}); use a .png, .svg or .pdf file") from problem
    return out
