"""FollowingPool: sends a rollout worker's requests directly to the servers of the controller's pool.

    controller   EnginePool    starts, updates, verifies and recovers servers
        |  PoolView            with each group, and on every change: addresses, versions, live servers
    worker       FollowingPool -> a server      requests go there directly; a lost request goes to another server
        |  PoolUse             with each finished group, for the metrics of the step

A late view does not cause errors: during an update, a server itself holds new requests; its answers name their weights; and
a request that the update interrupts continues afterwards.
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
    """Why the server is out."""
    version: int
    client: ClientView | None
    """The state of its HTTP client; None for an engine without an address."""


class PoolView(NamedTuple):
    """A snapshot of the controller's pool."""

    number: int
    """Increases with every view, so that older views can be ignored."""
    is_open: bool
    is_held: bool
    """Whether requests wait in the workers until the weights have changed (`UpdateGate`)."""
    version: int
    replicas: tuple[ReplicaView, ...]

    @classmethod
    def of(cls, pool: EnginePool) -> PoolView:
        """Return the current view of the controller's pool."""
        replicas = tuple(_view_of(replica) for replica in pool.replicas)
        return cls(time.monotonic_ns(), pool.is_open, pool.is_held, pool.served_version, replicas)


class FollowingPool(EnginePool):
    """A pool whose servers another process manages."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make a pool as `EnginePool` does, with one engine for each of the controller's servers, in the same order."""
        super().__init__(*args, **kwargs)
        self.admission.shuffle()
        self._number = -1
        self._coming = sys.maxsize  # any newer version: the controller may push weights before this process gets the view

    def follow(self, view: PoolView) -> None:
        """Apply the controller's view, unless a newer one was applied before."""
        if view.number <= self._number:
            return
        self._number, self._served, self.is_held = view.number, PoolWeights(view.version, None), view.is_held
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
        """Report this process's requests, which the controller adds to its metrics."""
        return PoolUse(self.busy_s, self.admission.queue.read(), self.use_totals())

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Refuse, because only the controller updates weights.

        Raises:
            EngineError: always.
        """
        raise EngineError(f"a rollout worker cannot send policy version {version} to the servers; only the controller can")

    def _bring_back(self, replica: Replica) -> None:
        """Do nothing: the controller recovers servers. Meanwhile, one request at a time tests whether a server is back."""


def _view_of(replica: Replica) -> ReplicaView:
    client = replica.engine.view if isinstance(replica.engine, RemoteEngine) else None
    return ReplicaView(replica.is_live, replica.is_gone, replica.why, replica.version, client)
