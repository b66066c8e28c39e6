"""Reward: the scalar that a trajectory is trained on, and the named scores that it was made of.

    Reward(total=0.95, components={"outcome": 1.0, "tool_step": -0.05})

The scores of turns are on the turns (`Trajectory.turn_scores`). If several agents act in one trajectory, a reward function
may score them separately: `agents` then has the reward of each agent, and each agent is trained on its reward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_REWARD = 1e15
"""The largest absolute value of a reward or score: the sum of their squares over a batch is still finite in float32."""
AGENTS = "agents"
"""The key, in the result of a reward function, of the scores by agent name."""


def as_score(value: Any) -> float | None:
    """Return a reward or score as a float; None for a text, another type, NaN, and numbers beyond ±`MAX_REWARD`."""
    if isinstance(value, str | bytes):  # a text may look like a number by chance: "1" may be an answer, "nan" a word
        return None
    try:
        number = float(value)
    except KeyboardInterrupt:
        raise
    except BaseException:  # a tensor of two numbers raises RuntimeError, and an author's class may raise anything
        return None
    return number if abs(number) <= MAX_REWARD else None  # NaN compares as false


def as_flag(value: Any) -> bool | None:
    """Return a plug-in's flag as a bool; None for a collection, NaN and a text, because bool("false") is True."""
    if isinstance(value, str | bytes | Mapping | list | tuple) or (isinstance(value, float) and math.isnan(value)):
        return None
    try:
        return bool(value)
    except KeyboardInterrupt:
        raise
    except BaseException:  # an array of several values raises, and an author's class may raise anything
        return None


def brief(value: Any, max_chars: int = 100) -> str:
    """Return an invalid value as one line of at most `max_chars` for an error message."""
    try:
        return " ".join(repr(value).split())[:max_chars]
    except KeyboardInterrupt:
        raise
    except BaseException:  # too many digits, nested too deeply, or an author's class that raises anything
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
        """Agent name -> its reward; empty if the trajectory has a single reward."""
        scores: Mapping[str, float] = self.info.get(AGENTS, {})
        return scores

    @property
    def numbers(self) -> dict[str, float]:
        """The components, and all valid scores among the further results of the reward function."""
        beside = {k: as_score(v) for k, v in self.info.items() if isinstance(v, int | float)}
        return {**{k: v for k, v in beside.items() if v is not None}, **self.components}

    def of(self, agent: str) -> float:
        """Return the reward of an agent, or that of the trajectory if the agent has none."""
        return self.agents.get(agent, self.total)
