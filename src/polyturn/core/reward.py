"""Reward: the scalar a trajectory is trained on, and the named scores it was made of.

    Reward(total=0.95, components={"outcome": 1.0, "tool_step": -0.05})

The score of each turn is not repeated here: it is on the turns (`Trajectory.turn_scores`). Where several agents act in one
trajectory and a reward function tells them apart, `agents` has what each of them earned, and each is trained on its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyturn.core.interrupts import pass_interrupt

MAX_REWARD = 1e15
"""The largest size of a reward or a score: squares of such, summed over a batch, are still finite in float32."""
AGENTS = "agents"
"""Under this key of what a reward function returned is the score of each agent, by the agent's name."""


def as_score(value: Any) -> float | None:
    """Return a reward or a score as a float; None for what is none: a text, no number, not finite, above `MAX_REWARD`."""
    if isinstance(value, str | bytes):  # that it reads as a number is chance: "1" may be an answer, "nan" a word
        return None
    try:
        number = float(value)
    except BaseException as problem:  # a tensor of two numbers raises RuntimeError, and a class of an author's what it likes
        pass_interrupt(problem)
        return None
    return number if abs(number) <= MAX_REWARD else None  # NaN compares as false


def as_flag(value: Any) -> bool | None:
    """Return a plug-in's yes or no; None for a text, of which "false" would be true, a collection and NaN."""
    if isinstance(value, str | bytes | Mapping | list | tuple) or (isinstance(value, float) and math.isnan(value)):
        return None
    try:
        return bool(value)
    except BaseException as problem:  # an array of several, and whatever an author's class raises
        pass_interrupt(problem)
        return None


def brief(value: Any, max_chars: int = 100) -> str:
    """Return a wrong value of a plug-in or a judge as one line for an error message."""
    try:
        return " ".join(repr(value).split())[:max_chars]
    except BaseException as problem:  # more digits than are written out, nested too deep, or what an author's class raises
        pass_interrupt(problem)
        return f"a {type(value).__name__} that cannot be written out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The reward of one trajectory."""

    total: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Named scores before weighting."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Further results of the reward function."""

    @property
    def agents(self) -> Mapping[str, float]:
        """The total reward of each agent; empty where the trajectory has one reward."""
        scores: Mapping[str, float] = self.info.get(AGENTS, {})
        return scores

    @property
    def numbers(self) -> dict[str, float]:
        """The components, and the numbers that the reward function returned beside its score, where they are scores."""
        beside = {k: as_score(v) for k, v in self.info.items() if isinstance(v, int | float)}
        return {**{k: v for k, v in beside.items() if v is not None}, **self.components}

    def of(self, agent: str) -> float:
        """Return an agent's reward: its own, else the trajectory's."""
        return self.agents.get(agent, self.total)
