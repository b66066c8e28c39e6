"""Metrics: values with their reduction (mean, sum or maximum), so that the metrics of many episodes merge into one.

    merge([{"rollout/turns": Mean(2.0)}, {"rollout/turns": Mean(4.0)}])  ->  {"rollout/turns": Mean(6.0, 2.0)}
    reduce(...)                                                          ->  {"rollout/turns": 3.0}

Names are under rollout/ reward/ tokens/ policy/ critic/ loss/ buffer/ engine/ time/ eval/ tool/ policies/ and system/.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean."""

    total: float
    count: float = 1.0

    @property
    def value(self) -> float:
        """The mean; NaN if `count` is 0."""
        return self.total / self.count if self.count else float("nan")


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum."""

    total: float

    @property
    def value(self) -> float:
        """The sum."""
        return self.total


@dataclass(frozen=True, slots=True)
class Max:
    """A maximum."""

    total: float

    @property
    def value(self) -> float:
        """The largest value."""
        return self.total


Metric = Mean | Sum | Max
Metrics = dict[str, Metric]


def merge(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Merge metrics of the same name, each with its reduction.

    Raises:
        TypeError: a name has two different reductions.
    """
    out: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            out[name] = _add(name, out[name], metric) if name in out else metric
    return out


def reduce(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the plain value of each metric."""
    return {name: metric.value for name, metric in metrics.items()}


def _add(name: str, a: Metric, b: Metric) -> Metric:
    if isinstance(a, Mean) and isinstance(b, Mean):
        return Mean(a.total + b.total, a.count + b.count)
    if isinstance(a, Sum) and isinstance(b, Sum):
        return Sum(a.total + b.total)
    if isinstance(a, Max) and isinstance(b, Max):
        return Max(max(a.total, b.total))
    raise TypeError(f"the metric {name!r} is a {type(a).__name__} in one place and a {type(b).__name__} in another")
