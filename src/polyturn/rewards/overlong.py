"""A penalty for long responses that grows before the limit instead of striking at it (DAPO, arXiv 2503.14476, eq. 13).

    Overlong(max_tokens=100, buffer=20, penalty=1)     80 tokens -> 0     90 -> -0.5     100 and more -> -1

Separate from the reward functions, because it looks at tokens and not at what they say.
"""

from __future__ import annotations

from dataclasses import dataclass

from polyturn.core.errors import ConfigError
from polyturn.core.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlong:
    """The penalty of a run."""

    max_tokens: int
    """The length that costs the whole penalty: tokens after the first prompt, observations included."""
    buffer: int
    """Over how many tokens before it the penalty grows."""
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.max_tokens:
            raise ConfigError(
                f"reward.overlong: buffer is {self.buffer} and max_tokens is {self.max_tokens}; the buffer must be shorter"
            )

    def score(self, trajectory: Trajectory) -> float:
        """Return 0 for a short response, and down to -penalty for one near the limit."""
        length = sum(len(trajectory.span(ref)) for turn in trajectory.turns for ref in turn.spans)
        exceeded = length - (self.max_tokens - self.buffer)
        return -self.penalty * min(max(exceeded / self.buffer, 0.0), 1.0)
