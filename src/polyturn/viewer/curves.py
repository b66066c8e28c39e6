"""Thins a run's curves to the points that a chart needs.

    5,000 steps of reward/mean  ->  the first, lowest, highest and last point of each of 300 columns

A line through these points has the same pixels as a line through all points. Source: Jugel et al. 2014 (M4: A
Visualization-Oriented Time Series Data Aggregation). A curve is smoothed before it is thinned, so extremes keep their
weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyturn.core.errors import DataError, did_you_mean

Values = NDArray[np.float64]
AXES = {"step": "", "time": "time/step_s", "tokens": "tokens/sampled"}
"""x axis of a curve -> the metric that it accumulates over steps."""
COLUMNS = 300
"""Number of columns of a chart; each shows at most four points."""


class Window(NamedTuple):
    """The x axis, range and smoothing of a curve."""

    axis: str = "step"
    """A name of `AXES`."""
    low: float = -np.inf
    high: float = np.inf
    smoothing: float = 0.0
    """Weight of earlier values in a bias-corrected exponential moving average, in [0, 1)."""


def draw(lines: Sequence[Mapping[str, Any]], names: Iterable[str], window: Window) -> dict[str, dict[str, Any]]:
    """Return the curve of each metric: `x` and `y`, `smooth_x` and `smooth_y`, `total` and `is_sparse`.

    Args:
        lines: The lines of the run's metrics file.
        names: Names of metrics.
        window: The part to draw.

    Raises:
        DataError: the window is invalid.
    """
    if window.axis not in AXES:
        raise DataError(f"there is no axis {window.axis!r}.{did_you_mean(window.axis, AXES)}")
    if not 0 <= window.smoothing < 1:
        raise DataError(f"the smoothing is {window.smoothing}; it must be at least 0 and below 1")
    positions = _positions(lines, AXES[window.axis])
    return {name: _curve(lines, name, positions, window) for name in names}


def _curve(lines: Sequence[Mapping[str, Any]], name: str, positions: Mapping[int, float], window: Window) -> dict[str, Any]:
    points = {line["step"]: line[name] for line in lines if line.get(name) is not None}
    steps = sorted(step for step in points if step in positions)
    x, y = np.array([positions[s] for s in steps], np.float64), np.array([points[s] for s in steps], np.float64)
    smooth = _smoothed(y, window.smoothing) if window.smoothing else y[:0]
    inside = (x >= window.low) & (x <= window.high)
    between = sum(1 for step in positions if steps and steps[0] <= step <= steps[-1])
    kept = thinned(x[inside], y[inside])
    curve = {"x": x[inside][kept].tolist(), "y": y[inside][kept].tolist(), "smooth_x": [], "smooth_y": []}
    if len(smooth):
        kept = thinned(x[inside], smooth[inside])
        curve |= {"smooth_x": x[inside][kept].tolist(), "smooth_y": smooth[inside][kept].tolist()}
    return {**curve, "total": int(inside.sum()), "is_sparse": len(steps) == 1 or 2 * len(steps) <= between}


def _positions(lines: Sequence[Mapping[str, Any]], summed: str) -> dict[int, float]:
    """Return step -> position on the axis: the step itself, or the sum of a metric up to it."""
    steps = sorted({line["step"] for line in lines})
    if not summed:
        return {step: float(step) for step in steps}
    spent = {line["step"]: min(max(line[summed], 0.0), 2.0**53) for line in lines if line.get(summed) is not None}
    sums = np.cumsum([spent.get(step, 0.0) for step in steps])
    return dict(zip(steps, sums.tolist(), strict=True)) if spent else {}


def _smoothed(y: Values, weight: float) -> Values:
    out, kept, norm = np.empty_like(y), 0.0, 0.0
    for i, value in enumerate(y.tolist()):
        kept, norm = weight * kept + (1 - weight) * value, weight * norm + (1 - weight)
        out[i] = kept / norm
    return out


def thinned(x: Values, y: Values, columns: int = COLUMNS) -> NDArray[np.int64]:
    """Return the indices of the points that a chart needs: the first, lowest, highest and last of each column.

    Args:
        x: [N] ascending.
        y: [N] finite.
        columns: Number of columns of the chart.
    """
    if len(x) <= 4 * columns:
        return np.arange(len(x))
    column = np.minimum((x - x[0]) / max(x[-1] - x[0], np.finfo(float).tiny) * columns, columns - 1).astype(np.int64)
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    by_value = np.lexsort((y, column))  # sorted by value inside each column
    ends = np.append(starts[1:], len(x)) - 1
    return np.unique(np.concatenate([starts, ends, by_value[starts], by_value[ends]]))
