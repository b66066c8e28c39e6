"""A penalty for long responses that grows before the limit (DAPO, arXiv 2503.14476, eq. 13).

    Overlong(max_tokens=100, buffer=20, penalty=1)     80 tokens -> 0     90 -> -0.5     100 and more -> -1

The penalty depends only on the number of tokens, not on the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from polyturn.core.errors import ConfigError
from polyturn.core.trajectory import SpanSource, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlong:
    """A penalty that grows over the last tokens before the limit, as in DAPO."""

    PART: ClassVar[str] = "the penalty for length"

    buffer: Annotated[int, Field(ge=0)] = 0
    """Number of tokens before `max_tokens` over which it grows from 0 to `penalty`; 0 means no penalty."""
    penalty: Annotated[float, Field(ge=0)] = 1.0
    """The whole penalty, at the limit."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """The length that costs the whole penalty, observations included; defaults to rollout.limits.max_tokens."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and not 0 <= self.buffer <= self.max_tokens:
            raise ConfigError(
                f"reward.overlong: buffer is {self.buffer} and max_tokens is {self.max_tokens}; use 0 to max_tokens"
            )

    def score(self, trajectory: Trajectory) -> float:
        """Return the penalty: 0 for a short response, falling to `-penalty` at the limit."""
        if not self.buffer:
            return 0.0
        assert self.max_tokens is not None
        spans = (trajectory.span(ref) for turn in trajectory.turns for ref in turn.spans)
        length = sum(len(span) for span in spans if span.source is not SpanSource.PROMPT)  # a rewrite adds prompt spans
        exceeded = length - (self.max_tokens - self.buffer)
        return -self.penalty * min(max(exceeded / self.buffer, 0.0), 1.0)
