"""Replica: the state of one server of a pool.

up        accepts requests while it has slots
down      lost; `recovery.py` brings it back, or, if its engine is not `Revivable`, one request tests it from time to time
stale     has other weights than the pool; accepts no requests until it has the pool's weights
gone      lost for good
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from polyturn.core.errors import one_line
from polyturn.core.generation import GenerateRequest
from polyturn.core.protocols import Engine

logger = logging.getLogger(__name__)

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0


@dataclass(slots=True, eq=False)
class PooledRequest:
    """A request in the pool, from arrival to answer."""

    request: GenerateRequest
    arrived: float
    assigned: asyncio.Future[Replica]
    is_aborted: bool = False


@dataclass(slots=True, eq=False)
class Replica:
    """One server of the pool."""

    engine: Engine
    name: str
    slots: int
    version: int = 0
    running: dict[str, PooledRequest] = field(default_factory=dict)
    is_up: bool = True
    is_stale: bool = False
    """Whether its weights are older than the pool's, or unknown."""
    is_gone: bool = False
    recovery: asyncio.Task[None] | None = None
    """The task that brings it back; it accepts no requests until then."""
    epoch: int = 0
    """Number of losses; the failure of a request from an earlier epoch does not concern the current server."""
    probes_at: float = 0.0
    """Time on the event loop's clock, in seconds, from which a server that is down may be tried again."""
    pause_s: float = FIRST_RETRY_S
    why: str = ""
    """Why the server is out, or why the last recovery failed."""
    num_done: int = 0

    @property
    def load(self) -> int:
        """Number of running requests."""
        return len(self.running)

    @property
    def is_live(self) -> bool:
        """Whether it serves the pool's weights."""
        return self.is_up and not (self.is_stale or self.is_gone) and self.recovery is None

    def takes_work(self, now: float) -> bool:
        """Return whether it accepts requests."""
        if self.is_live:
            return len(self.running) < self.slots
        if self.is_stale or self.is_gone or self.recovery is not None:
            return False
        return now >= self.probes_at and not self.running  # one request tests it


class PoolUse(NamedTuple):
    """Statistics of one process that sends requests to servers through a separate pool."""

    busy_s: float
    """Seconds with at least one running request."""
    queue: float
    """Mean number of requests waiting there since the previous report."""
    totals: Mapping[str, float]
    """Metric name -> number of requests so far."""


def reasons(replicas: Sequence[Replica]) -> str:
    """Return the reasons why servers are out, grouped: "replica 0 and 3 more: it did not answer"."""
    names: dict[str, list[str]] = {}
    for replica in replicas:
        if replica.why:
            names.setdefault(replica.why, []).append(replica.name)
    reasons = (f"{first}{f' and {len(more)} more' if more else ''}: {why}" for why, (first, *more) in names.items())
    return "; ".join(reasons) or "no reason is known"


class Outage:
    """Logs once that no server of a pool is up, with the reasons, and again if the reasons change, apart from numbers in
    them."""

    def __init__(self, replicas: Sequence[Replica], *, patience_s: float) -> None:
        self._replicas, self._patience_s = replicas, patience_s
        self._logged: set[str] = set()

    def note(self, replica: Replica, problem: Exception) -> None:
        """Record why a server was lost or not recovered, and log it if no server is left."""
        replica.why = one_line(problem)
        if any(one.is_live for one in self._replicas):
            return
        distinct_reasons = {re.sub(r"\d+", "", one.why) for one in self._replicas}
        if distinct_reasons != self._logged:
            self._logged = distinct_reasons
            logger.warning(
                "no server is up (%s); requests and weights wait up to %g s for a server to come back (engine.patience_s)",
                reasons(self._replicas),
                self._patience_s,
            )

    def end(self, replica: Replica) -> None:
        """Record that a server is back."""
        replica.why, self._logged = "", set()
