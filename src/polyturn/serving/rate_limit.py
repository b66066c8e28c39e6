"""Rate limit of a server's clients: one token bucket per address."""

from __future__ import annotations

import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from polyturn.core.errors import ConfigError

MAX_CLIENTS = 10_000
"""Largest number of clients to remember; the least recently seen is forgotten first."""
_RATE = re.compile(r"(?P<count>\d+(?:\.\d+)?)(?:/(?P<unit>s|min|h))?(?::(?P<burst>\d+))?")
_UNITS = {None: 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRateLimit:
    """A bucket of `burst` requests that fills at `per_s` a second."""

    per_s: float
    burst: float

    @classmethod
    def parse(cls, text: str) -> ClientRateLimit:
        """Parse "20", "20/s", "600/min" or "600/min:50" (a burst of 50; the default is two seconds' worth, at least one).

        Raises:
            ConfigError: the text has another form.
        """
        match = _RATE.fullmatch(text.strip())
        if match is None or float(match["count"]) <= 0 or match["burst"] == "0":
            raise ConfigError(
                f"the rate limit is {text!r:.80}; write requests and a unit: 20/s, 600/min, 600/min:50, 1000/h"
            )
        per_s = float(match["count"]) / _UNITS[match["unit"]]
        return cls(per_s=per_s, burst=float(match["burst"] or max(1.0, 2 * per_s)))


class ClientRates:
    """Counts the requests of every client."""

    def __init__(self, limit: ClientRateLimit, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Client -> requests left in its bucket, and the time when they were counted."""

    def count(self, client: str) -> int:
        """Count a request; return 0 if it may be answered, else the seconds until the client may try again."""
        now = self._clock()
        left, since = self._buckets.pop(client, (self._limit.burst, now))
        left = min(self._limit.burst, left + (now - since) * self._limit.per_s)
        self._buckets[client] = (left - (left >= 1.0), now)
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return 0 if left >= 1.0 else math.ceil((1.0 - left) / self._limit.per_s)
