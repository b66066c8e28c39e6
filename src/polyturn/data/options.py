"""Options of the order of tasks: the shares of data sources.

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
    """Weights of data sources in a run's order of tasks."""

    PART: ClassVar[str] = "any sampler"

    name: Literal["mix"] = "mix"
    """`mix`, or `file.py:Class` of a Curriculum."""
    weights: Mapping[str, float | list[tuple[int, float]]]
    """data_source -> a weight, or [step, weight] pairs that are interpolated linearly."""
    by_success: Annotated[float, Field(ge=0)] = 0.0
    """Strength of the preference for sources with a success rate near one half; 0 turns it off."""

    def __post_init__(self) -> None:
        for name, points in self.points.items():
            steps = [step for step, _ in points]
            if not points or steps != sorted(set(steps)) or any(value < 0 for _, value in points):
                raise ConfigError(
                    f"data.sampler.weights has {self.weights[name]!r} for {name!r}; use a number of at least 0, or "
                    "[step, weight] pairs with increasing steps"
                )
        if not any(value for points in self.points.values() for _, value in points):
            raise ConfigError(f"data.sampler.weights is {dict(self.weights)!r}; at least one weight must be above 0")

    @property
    def points(self) -> Mapping[str, Sequence[tuple[int, float]]]:
        """data_source -> points (step, weight) with increasing steps."""
        return {name: [(0, w)] if isinstance(w, int | float) else w for name, w in self.weights.items()}
