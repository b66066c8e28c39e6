"""Breaker: a tool that failed several times in a row, through no fault of the model's, is left alone for a while.

    closed ── n failures in a row, of several episodes ──► open: calls are answered at once, for `cooldown_s`
      ▲                                                      │ then one call is let through to try
      └────────────── it is answered ◄───────────────────────┤
                                                             └── it fails: open again, for twice as long

A failure is a time-out or a lost connection. A refusal, a crash or bad arguments say that the tool was reached, so they
count as answers; and a call that was late while another one was answered was slow by itself, and counts for nothing. So a
policy does not open the breaker for others with what it writes, and one episode alone cannot open it either.
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
        if self.failures < 0 or self.min_episodes < 1 or not 0 < self.cooldown_s <= self.max_cooldown_s:
            raise ConfigError(
                f"a breaker with failures {self.failures}, min_episodes {self.min_episodes}, cooldown_s {self.cooldown_s:g} "
                f"and max_cooldown_s {self.max_cooldown_s:g} cannot work; use at least 0, at least 1, and a positive "
                "cooldown_s that is at most max_cooldown_s"
            )


class Breaker:
    """The breaker of one tool, shared by all episodes."""

    def __init__(
        self, tool: str, settings: BreakerSettings | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_opened = 0
        """Number of times that the tool was given up."""
        self._tool = tool
        self._settings = settings or BreakerSettings()
        self._clock = clock
        self._failures = 0
        self._episodes: set[str] = set()
        self._cooldown_s = 0.0
        """0 while it is closed."""
        self._until = 0.0
        self._counted = -math.inf
        """When the latest failure was counted."""
        self._answered = -math.inf
        """When the tool last answered."""
        self._is_trying = False

    @property
    def is_open(self) -> bool:
        """Whether calls are answered without asking the tool."""
        return self._cooldown_s > 0

    def admit(self) -> float | None:
        """Return None if a call may be made, else for how many more seconds the tool is left alone.

        Who was admitted must say what came of it: `answered`, `failed` or `left`.
        """
        if not self.is_open:
            return None
        rest = self._until - self._clock()
        if rest > 0:
            return rest
        if self._is_trying:
            return self._cooldown_s
        self._is_trying = True
        return None

    def answered(self) -> None:
        """Count an answer, a refusal and a crash included: the tool can be reached."""
        if self.is_open:
            logger.info("tool %r answers again", self._tool)
        self._failures, self._cooldown_s, self._is_trying = 0, 0.0, False
        self._episodes.clear()
        self._answered = self._clock()

    def failed(self, episode: str, *, began: float | None = None, is_late: bool = False) -> None:
        """Count a time-out or a lost connection.

        Args:
            episode: Whose call it was.
            began: When the call began. Calls that were under way when what they asked broke off are one failure together.
            is_late: Whether it was a time-out, which is the call's own fault where the tool has answered since it began.
        """
        settings = self._settings
        if is_late and began is not None and self._answered >= began:
            return self.left()
        if self.is_open:
            if self._is_trying:
                self._open(min(2 * self._cooldown_s, settings.max_cooldown_s))
            return  # it was under way when the breaker opened
        if len(self._episodes) < settings.min_episodes:
            self._episodes.add(episode)
        if is_late or began is None or began >= self._counted:
            self._counted = self._clock()
            self._failures += 1
        if 0 < settings.failures <= self._failures and len(self._episodes) >= settings.min_episodes:
            self._open(settings.cooldown_s)

    def left(self) -> None:
        """Say that an admitted call ended before anything came of it; another one may try."""
        self._is_trying = False

    def _open(self, cooldown_s: float) -> None:
        self.num_opened += 1
        self._cooldown_s, self._is_trying = cooldown_s, False
        self._until = self._clock() + cooldown_s
        log = logger.warning if self.num_opened == 1 else logger.info
        log(
            "tool %r failed %d times in a row (time-outs or lost connections): its calls are answered with an error for "
            "%g s, then one is tried",
            self._tool,
            self._failures,
            cooldown_s,
        )
