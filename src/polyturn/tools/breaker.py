"""Breaker: suspends calls of a tool that has failed several times in a row for reasons outside the model's control.

    `failures` failures in a row      ->   for `cooldown_s`, calls fail at once without reaching the tool
    the next call to the tool fails   ->   the same, for twice as long, up to `max_cooldown_s`
    the tool answers                  ->   the count and the length of the pause start again

A failure is a time-out or a lost connection. A refusal, a crash or bad arguments count as answers, because the tool was
reached; so a policy cannot open the breaker for other episodes by its calls. Concurrent failures count as one.
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
    """When the calls of an unresponsive tool are suspended, which means that they are answered with an error at once."""

    PART: ClassVar[str] = "the breaker"

    failures: Annotated[int, Field(ge=0)] = 8
    """Number of time-outs and lost connections in a row that suspends a tool; 0 disables the breaker."""
    cooldown_s: Annotated[float, Field(gt=0)] = 1.0
    """Seconds until the tool is called again; doubled each time that call fails."""
    max_cooldown_s: Annotated[float, Field(gt=0)] = 60.0
    """Longest suspension, in seconds."""

    def __post_init__(self) -> None:
        if self.cooldown_s > self.max_cooldown_s:
            raise ConfigError(f"cooldown_s {self.cooldown_s:g} exceeds max_cooldown_s {self.max_cooldown_s:g}; lower it")


class Breaker:
    """The breaker of one tool, shared by all episodes. The caller reports each call by `answered` or `failed`."""

    def __init__(
        self, tool: str, settings: BreakerSettings | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tool, self._settings, self._clock = tool, settings or BreakerSettings(), clock
        self._num_failures, self._pause_s = 0, self._settings.cooldown_s
        self._until = self._counted = -math.inf
        """`_until`: the time until which calls are suspended. `_counted`: the time of the last counted answer or failure."""

    def admit(self) -> float | None:
        """Return None if a call may be made, else the number of seconds for which calls are still suspended."""
        rest_s = self._until - self._clock()
        return rest_s if rest_s > 0 else None

    def answered(self) -> None:
        """Reset the count after an answer."""
        self._num_failures, self._pause_s = 0, self._settings.cooldown_s
        self._until, self._counted = -math.inf, self._clock()

    def failed(self, *, began: float) -> None:
        """Count a time-out or a lost connection of a call that began at `began`."""
        if began < self._counted:  # after this call began, another one was answered, or its failure was counted
            return
        self._num_failures += 1
        self._counted = self._clock()
        if 0 < self._settings.failures <= self._num_failures:
            self._until = self._counted + self._pause_s
            logger.warning(
                "tool %r failed %d times in a row: its calls are answered with an error for %g s",
                self._tool,
                self._num_failures,
                self._pause_s,
            )
            self._pause_s = min(2 * self._pause_s, self._settings.max_cooldown_s)
