"""Options of the order of tasks: the share of each data source in a run's visits.

data: {sampler: {name: mix, weights: {gsm8k: 2, search: [[0, 0], [100, 1]]}}}        MixOptions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from polyturn.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MixOptions:
    """The division of a run's visits among data sources."""

    PART: ClassVar[str] = "any sampler"

    name: Literal["mix"] = "mix"
    """`mix`, or `file.py:Class` of a Curriculum."""
    weights: Mapping[str, float | list[tuple[int, float]]]
    """data_source to a weight, or to [step, weight] pairs that are interpolated linearly."""
    by_success: Annotated[float, Field(ge=0)] = 0.0
    """How strongly sources with a success rate near one half are preferred; 0 is not at all."""

    def __post_init__(self) -> None:
        for name, points in self.points.items():
            steps = [step for step, _ in points]
            if not points or steps != sorted(set(steps)) or any(value < 0 for _, value in points):
                raise ConfigError(
                    f"data.sampler.weights has {self.weights[name]!r} for {name!r}; give a number from 0 on, or "
                    "[step, weight] pairs in rising order of steps"
                )
        if not any(value for points in self.points.values() for _, value in points):
            raise ConfigError(f"data.sampler.weights is {dict(self.weights)!r}; give one of them a weight above 0")

    @property
    def points(self) -> Mapping[str, Sequence[tuple[int, float]]]:
        """data_source -> points (step, weight), steps rising."""
        return {name: [(0, w)] if isinstance(w, int | float) else w for name, w in self.weights.items()}
