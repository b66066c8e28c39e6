"""Options of the store of trajectories: the part of a run that is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """The trajectories that a run keeps in its folder, under trajectories/."""

    share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the groups of training that are kept, the same ones for the same ids. Evaluations are kept whole."""
    max_gb: Annotated[float, Field(gt=0)] | None = None
    """The oldest trajectories of training go once all take more than this many GB; null keeps all."""
