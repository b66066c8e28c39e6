"""Options of validation during training.

evaluation: {every: 20, limit_during: 100, patience: 5}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """When a run is validated, and when validation ends it early."""

    before: bool = True
    """Whether to validate before training, as a baseline for the end."""
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between validations; 0 validates only before and after."""
    limit_during: Annotated[int, Field(ge=1)] | None = None
    """Number of tasks to use during training, from the beginning; null uses all."""
    stop_at: float | None = None
    """Training ends early once the first set has this success rate; null never ends it early."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """Number of validations without a better result after which training ends. The one before training counts too."""
