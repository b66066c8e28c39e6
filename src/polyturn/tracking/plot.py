"""The learning curve of a run as a PNG, drawn from its `metrics.jsonl`.

Separate because only this file needs matplotlib, which is imported when it is called and never opens a window.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from polyturn.core.errors import ConfigError, DataError
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
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("drawing needs matplotlib, which is not installed; run: pip install 'polyturn[train]'") from error
    steps = read_metrics(metrics) if metrics.is_file() else []
    if not steps:
        raise DataError(f"there is no step in {metrics}; a learning curve needs a run that logged at least one")
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        _draw(axes, panel, steps)
    if title:
        figure.suptitle(title)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110, format="png")
    return out


def curves(steps: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, list[tuple[int, float]]]:
    """Return the points of each metric that `names` match: {"eval greedy": [(0, 0.31), (10, 0.5)], "training": [...]}."""
    found: dict[str, list[tuple[int, float]]] = {}
    for name in names:
        head, star, tail = name.partition("*")
        for step in steps:
            for key, value in step.items():
                is_match = key.startswith(head) and key.endswith(tail) and len(key) > len(name) - 1 if star else key == name
                if is_match and value is not None:
                    label = f"eval {key[len(head) : len(key) - len(tail)]}" if star else "training"
                    found.setdefault(label, []).append((step["step"], value))
    return found


def _draw(axes: Axes, panel: _Panel, steps: list[dict[str, Any]]) -> None:
    found = curves(steps, panel.names)
    for label, points in found.items():
        is_eval = label.startswith("eval")
        axes.plot(*zip(*points, strict=True), marker="o" if is_eval else None, linewidth=2 if is_eval else 1, label=label)
    axes.set_title(panel.title)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if found:
        axes.legend()
    else:
        axes.text(0.5, 0.5, "not recorded", ha="center", va="center", transform=axes.transAxes, color="grey")
    if panel.title == "success":
        axes.set_ylim(-0.02, 1.02)
