"""What can be chosen about the store of trajectories: how much of a run is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """How much of the trajectories a run keeps in its folder, under trajectories/."""

    share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the groups of training that are kept, the same ones for the same ids. Evaluations are kept whole."""
    max_gb: Annotated[float, Field(gt=0)] | None = None
    """The oldest trajectories of training go once all take more than this many GB; null keeps all."""
