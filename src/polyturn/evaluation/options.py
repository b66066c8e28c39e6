"""Options of validation during training.

evaluation: {every: 20, limit_during: 100, patience: 5}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """When a run is validated, and what follows from it."""

    before: bool = True
    """Validate before training; without it there is nothing to compare the end with."""
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between validations; 0 validates only before and after."""
    limit_during: Annotated[int, Field(ge=1)] | None = None
    """During training only the first so many tasks are used."""
    stop_at: float | None = None
    """End training early once the first set's success reaches this."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """End training after so many validations without a better result. The one before training counts as a result."""
