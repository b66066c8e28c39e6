"""Reward: the scalar a trajectory is trained on, and the named scores it was made of.

    Reward(total=0.95, components={"outcome": 1.0, "tool_step": -0.05})

The score of each turn is not repeated here: it is on the turns (`Trajectory.turn_scores`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """What one trajectory earned."""

    total: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Named scores before weighting."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the reward function returned."""
