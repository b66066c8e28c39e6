"""verl.utils.metric: numbers that are collected under a name, and one number made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch


class AggregationType(Enum):
    """The reduction of a metric's numbers."""

    MEAN = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


_REDUCE = {
    AggregationType.MEAN: np.mean,
    AggregationType.SUM: np.sum,
    AggregationType.MIN: np.min,
    AggregationType.MAX: np.max,
}


class Metric:
    """Numbers, and how they become one.

    Raises:
        ValueError: there is no such aggregation.
    """

    def __init__(self, aggregation: str | AggregationType, value: Any = None) -> None:
        self.aggregation = AggregationType(aggregation)
        self.values: list[Any] = []
        if value is not None:
            self.append(value)

    def append(self, value: Any) -> None:
        """Add a number, a tensor that holds one, or those of another metric.

        Raises:
            ValueError: it is something else.
        """
        if isinstance(value, Metric):
            self.extend(value)
            return
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(f"a metric takes numbers; this tensor has {value.numel()}")
            value = value.detach().item()
        if not isinstance(value, int | float | np.number | np.ndarray):
            raise ValueError(f"a metric takes numbers, not a {type(value).__name__}")
        self.values.append(value)

    def extend(self, values: Metric | Iterable[Any]) -> None:
        """Add numbers, or those of another metric.

        Raises:
            ValueError: the other metric makes something else of its numbers.
        """
        if isinstance(values, Metric):
            if values.aggregation is not self.aggregation:
                raise ValueError(f"a metric of {self.aggregation.value} cannot take one of {values.aggregation.value}")
            values = list(values.values)
        for value in values:
            self.append(value)

    def aggregate(self) -> float:
        """Return the one number."""
        return _REDUCE[self.aggregation](self.values)  # type: ignore[no-any-return, operator]

    @classmethod
    def aggregate_dp(cls, metric_lists: Sequence[Metric]) -> float:
        """Return the one number of several processes: of a sum or a mean, that of their mean at each place.

        Raises:
            ValueError: there is none, or they have not as many numbers.
        """
        if len({len(metric.values) for metric in metric_lists}) != 1:
            lengths = [len(metric.values) for metric in metric_lists]
            raise ValueError(f"processes must have as many numbers of a metric; these have {lengths}")
        every, aggregation = np.array([metric.values for metric in metric_lists]), metric_lists[0].aggregation
        of_all = every if aggregation in (AggregationType.MIN, AggregationType.MAX) else every.mean(axis=0)
        return _REDUCE[aggregation](of_all)  # type: ignore[no-any-return, operator]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], aggregation: str | AggregationType) -> dict[str, Metric]:
        """Return a metric for each number."""
        return {key: cls(aggregation, value) for key, value in data.items()}

    def init_list(self) -> Metric:
        """Return an empty metric of the same kind."""
        return Metric(self.aggregation)


def reduce_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Replace each list of numbers by one: by the largest or smallest where the name has max or min in it, else the mean."""
    for key, values in metrics.items():
        if isinstance(values, Metric):
            metrics[key] = values.aggregate()
        else:
            metrics[key] = (np.max if "max" in key else np.min if "min" in key else np.mean)(values)
    return metrics
