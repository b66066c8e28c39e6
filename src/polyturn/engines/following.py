"""FollowingPool: the servers of a controller's pool, as a rollout worker in another process asks them by itself.

    controller   EnginePool    starts, updates, verifies and brings back servers
        |  PoolView            with each group, and whenever it changes: addresses, versions, which servers are live
    worker       FollowingPool -> a server      requests go there directly; a lost one is asked of another server
        |  PoolUse             with each group that is done, for the metrics of the step

A view may arrive late, and nothing waits for it: a server in an update holds new requests by itself, its answers name their
weights, and a request that the update cuts goes on from there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from polyturn.core.errors import EngineError
from polyturn.engines.pool import EnginePool
from polyturn.engines.recovery import PoolWeights
from polyturn.engines.remote import ClientView, RemoteEngine
from polyturn.engines.replica import PoolUse, Replica


class ReplicaView(NamedTuple):
    """One server of the controller's pool."""

    is_live: bool
    is_gone: bool
    why: str
    """The reason why it is out."""
    version: int
    client: ClientView | None
    """None for an engine that is asked otherwise than by its address."""


class PoolView(NamedTuple):
    """The controller's pool at one moment."""

    number: int
    """Rises with time."""
    is_open: bool
    version: int
    replicas: tuple[ReplicaView, ...]

    @classmethod
    def of(cls, pool: EnginePool) -> PoolView:
        """Return the present view of a controller's pool."""
        replicas = tuple(_view_of(replica) for replica in pool.replicas)
        return cls(time.monotonic_ns(), pool.is_open, pool.served_version, replicas)


class FollowingPool(EnginePool):
    """A pool whose servers another process has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the engines, as `EnginePool`, one for each server of the controller's pool and in the same order."""
        super().__init__(*args, **kwargs)
        self._number = -1
        self._coming = sys.maxsize  # the controller may have pushed weights that this process has not heard of

    def follow(self, view: PoolView) -> None:
        """Take the controller's view, unless a newer one came before."""
        if view.number <= self._number:
            return
        self._number, self._served = view.number, PoolWeights(view.version, None)
        for replica, now in zip(self.replicas, view.replicas, strict=True):
            is_back = now.is_live and replica.is_stale
            if isinstance(replica.engine, RemoteEngine) and now.client is not None:
                is_back |= now.is_live and now.client.url != replica.engine.url
                replica.engine.follow(now.client, is_open=view.is_open)
            replica.version, replica.is_stale, replica.is_gone = now.version, not now.is_live, now.is_gone
            replica.why = now.why or replica.why
            if is_back:
                self._up(replica)
        self.admission.admit()

    def use(self) -> PoolUse:
        """Return the report of this process's requests, which the controller adds to its metrics."""
        return PoolUse(self.busy_s, self.admission.queue.read(), self.use_totals())

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Refuse, for only the controller brings weights.

        Raises:
            EngineError: always.
        """
        raise EngineError(f"a rollout worker was to bring version {version} to the engine, which only the controller does")

    def _bring_back(self, replica: Replica) -> None:
        """Leave that to the controller; meanwhile one request at a time finds out whether a lost server is back."""


def _view_of(replica: Replica) -> ReplicaView:
    client = replica.engine.view if isinstance(replica.engine, RemoteEngine) else None
    return ReplicaView(replica.is_live, replica.is_gone, replica.why, replica.version, client)
