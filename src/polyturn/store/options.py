"""Options of the store of trajectories."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Which trajectories a run keeps in its folder, under trajectories/."""

    share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of training groups to keep, in [0, 1]; the choice depends on the group's id only. Evaluations are kept whole."""
    max_gb: Annotated[float, Field(gt=0)] | None = None
    """Size in GB above which the oldest training trajectories are deleted; null keeps all."""
