"""Reward: the scalar a trajectory is trained on, and the named scores it was made of.

    Reward(total=0.95, components={"outcome": 1.0, "tool_step": -0.05})

The score of each turn is not repeated here: it is on the turns (`Trajectory.turn_scores`). Where several agents act in one
trajectory and a reward function tells them apart, `agents` has what each of them earned, and each is trained on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

AGENTS = "agents"
"""Under this key of what a reward function returned is the score of each agent, by the agent's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """What one trajectory earned."""

    total: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Named scores before weighting."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the reward function returned."""

    @property
    def agents(self) -> Mapping[str, float]:
        """What each agent earned in all; empty where the trajectory has one reward."""
        found: Mapping[str, float] = self.info.get(AGENTS, {})
        return found

    @property
    def numbers(self) -> dict[str, float]:
        """The components, and the numbers that the reward function returned beside its score."""
        return {**{k: float(v) for k, v in self.info.items() if isinstance(v, int | float)}, **self.components}

    def of(self, agent: str) -> float:
        """Return what an agent earned: its own, else the trajectory's."""
        return self.agents.get(agent, self.total)
