"""Curves as inline SVG: a picture that is part of a page, without a script and without a second file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 420, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 12, 28

Points = Sequence[tuple[float, float]]


def curve(series: Mapping[str, Points], *, title: str) -> str:
    """Return a chart of one or more series over the step; "" where not one has a point.

    The colour of series number i is the class `c<i>` of the page.
    """
    found = {name: [p for p in points if math.isfinite(p[1])] for name, points in series.items()}
    every = [p for points in found.values() for p in points]
    if not every:
        return ""
    x0, x1 = _span([p[0] for p in every])
    y0, y1 = _span([p[1] for p in every])

    def place(point: tuple[float, float]) -> str:
        x = _LEFT + (point[0] - x0) / (x1 - x0) * (WIDTH - _LEFT - _RIGHT)
        y = HEIGHT - _BOTTOM - (point[1] - y0) / (y1 - y0) * (HEIGHT - _TOP - _BOTTOM)
        return f"{x:.1f},{y:.1f}"

    label = f"{title}: " + "; ".join(f"{name} from {p[0][1]:.4g} to {p[-1][1]:.4g}" for name, p in found.items() if p)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">']
    for i in range(5):
        value = y0 + (y1 - y0) * i / 4
        _, y = place((x0, value)).split(",")
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for step, anchor in ((x0, "start"), (x1, "end")):
        x, _ = place((step, y0)).split(",")
        parts.append(f'<text x="{x}" y="{HEIGHT - 8}" text-anchor="{anchor}">{step:g}</text>')
    for i, points in enumerate(found.values()):
        if points:
            parts.append(f'<polyline class="c{i % 6}" points="{" ".join(place(p) for p in _thin(points))}"/>')
        if len(points) < 30:
            for x, y in (place(p).split(",") for p in points):
                parts.append(f'<circle class="c{i % 6}" cx="{x}" cy="{y}" r="2.2"/>')
    parts.append("</svg>")
    names = "".join(f'<span class="key"><i class="c{i % 6}"></i>{escape(name)}</span>' for i, name in enumerate(found))
    return f"<figure><figcaption>{escape(title)}</figcaption>{''.join(parts)}<div>{names}</div></figure>"


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _thin(points: Points, most: int = 800) -> Points:
    """Return at most about `most` of the points, the last one among them."""
    every = max(1, len(points) // most)
    return [*points[::every], *([points[-1]] if (len(points) - 1) % every else [])]
