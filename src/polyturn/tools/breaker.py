"""Breaker: a tool that failed several times in a row, through no fault of the model's, is left alone for a while.

    closed ── n failures in a row, of several episodes ──► open: calls are answered at once, for `cooldown_s`
      ▲                                                      │ then one call tries it
      └────────────── the tool answers ◄─────────────────────┤
                                                             └── the call fails: open again, for twice as long

A failure is a time-out or a lost connection. A refusal, a crash or bad arguments count as answers, because the tool was
reached. So the calls that a policy writes do not open the breaker for others, and one episode alone cannot open it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from polyturn.core.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    """When a tool that does not answer is left alone for a while, its calls answered at once with an error."""

    PART: ClassVar[str] = "the breaker"

    failures: Annotated[int, Field(ge=0)] = 8
    """Time-outs or lost connections in a row after which it is; 0 never."""
    min_episodes: Annotated[int, Field(ge=1)] = 2
    """Of how many episodes they must be."""
    cooldown_s: Annotated[float, Field(gt=0)] = 1.0
    """Seconds until one call tries it again; doubled each time that fails."""
    max_cooldown_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that it is left alone at most."""

    def __post_init__(self) -> None:
        if self.cooldown_s > self.max_cooldown_s:
            raise ConfigError(f"cooldown_s {self.cooldown_s:g} exceeds max_cooldown_s {self.max_cooldown_s:g}; lower it")


class Breaker:
    """The breaker of one tool, shared by all episodes. A call that was admitted ends with `answered`, `failed` or `left`."""

    def __init__(
        self, tool: str, settings: BreakerSettings | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_opened = 0
        self._tool, self._settings, self._clock = tool, settings or BreakerSettings(), clock
        self._failures, self._episodes = 0, set[str]()
        self._cooldown_s = self._until = 0.0  # a cool-down of 0: closed
        self._counted = self._answered = -math.inf  # when a failure was last counted, and when the tool last answered
        self._is_trying = False

    @property
    def is_open(self) -> bool:
        """Whether calls are answered without asking the tool."""
        return self._cooldown_s > 0

    def admit(self) -> float | None:
        """Return None if a call may be made, else for how many more seconds the tool is left alone."""
        if not self.is_open:
            return None
        if (rest_s := self._until - self._clock()) > 0 or self._is_trying:
            return rest_s if rest_s > 0 else self._cooldown_s
        self._is_trying = True
        return None

    def answered(self) -> None:
        """Close it."""
        if self.is_open:
            logger.info("tool %r answers again", self._tool)
        self._failures, self._cooldown_s, self._is_trying = 0, 0.0, False
        self._episodes.clear()
        self._answered = self._clock()

    def left(self) -> None:
        """Let another call try: an admitted one ended without a result."""
        self._is_trying = False

    def failed(self, episode: str, *, began: float | None = None, is_late: bool = False) -> None:
        """Count a time-out (`is_late`) or a lost connection of a call that began at `began`."""
        settings, began = self._settings, self._clock() if began is None else began
        if is_late and self._answered >= began:  # another call was answered meanwhile: this one was slow by itself
            self.left()
        elif self.is_open:
            if self._is_trying:  # else it was under way when the breaker opened
                self._open(min(2 * self._cooldown_s, settings.max_cooldown_s))
        else:
            if len(self._episodes) < settings.min_episodes:
                self._episodes.add(episode)
            if is_late or began >= self._counted:  # calls that a lost connection ended together are one failure
                self._counted = self._clock()
                self._failures += 1
            if 0 < settings.failures <= self._failures and len(self._episodes) >= settings.min_episodes:
                self._open(settings.cooldown_s)

    def _open(self, cooldown_s: float) -> None:
        self.num_opened += 1
        self._cooldown_s, self._until, self._is_trying = cooldown_s, self._clock() + cooldown_s, False
        message = "tool %r failed %d times in a row: its calls are answered with an error for %g s, then one is tried"
        logger.log(
            logging.WARNING if self.num_opened == 1 else logging.INFO, message, self._tool, self._failures, cooldown_s
        )
