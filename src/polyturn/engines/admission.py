"""Admission: the first-come, first-served queue of a pool's requests, and the choice of a server for each.

    an episode's next turn  ->  the server with its prefix, if it has a free slot; else another one, at the cost of a prefill
    an episode's first turn ->  the server with the fewest requests
    no server is live       ->  wait for a server that may be tried again; after `patience_s`, raise `EngineLostError`

The pool itself sends the requests and tracks the health of its servers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from polyturn.core.errors import EngineError, EngineLostError
from polyturn.engines.base import MeanOverTime
from polyturn.engines.replica import FIRST_RETRY_S, PooledRequest, Replica, reasons


class Admission:
    """The queue of a pool."""

    def __init__(self, replicas: Sequence[Replica], *, patience_s: float) -> None:
        """Start with an empty queue.

        Args:
            replicas: The pool's servers.
            patience_s: Seconds that a request waits while no server is up.
        """
        self.num_moved = 0
        """Number of turns sent to a server without their prefix."""
        self._replicas = replicas
        self._patience_s = patience_s
        self._homes: dict[str, Replica] = {}
        """The replica of each episode's latest turn."""
        self._waiting: dict[PooledRequest, None] = {}
        """Waiting requests, in the order of arrival."""
        self.queue = MeanOverTime()
        """The length of the queue."""
        self._timer: asyncio.TimerHandle | None = None
        self._out_since: float | None = None
        """Time on the event loop's clock, in seconds, since which requests wait and no server is live; None if one is."""

    async def place(self, waiting: PooledRequest) -> Replica | None:
        """Return a server with a slot for the request; None if the request is aborted or its deadline passes.

        Raises:
            EngineLostError: no server came back in time.
            EngineError: the pool was closed.
        """
        self._waiting[waiting] = None
        self.queue.set(len(self._waiting))
        self.admit()
        try:
            if waiting.assigned.done():
                return waiting.assigned.result()
            async with asyncio.timeout_at(waiting.request.deadline):
                replica = await waiting.assigned
        except TimeoutError:
            self._withdraw(waiting)
            return None
        except asyncio.CancelledError:
            self._withdraw(waiting)
            task = asyncio.current_task()
            if waiting.is_aborted and (task is None or not task.cancelling()):
                return None
            raise
        if waiting.is_aborted:  # after it got the server's slot, and before the server could hear of it
            self.free(replica, waiting)
            return None
        return replica

    def free(self, replica: Replica, waiting: PooledRequest) -> None:
        """Release the slot of a request."""
        if replica.running.get(waiting.request.request_id) is waiting:
            del replica.running[waiting.request.request_id]
        self.admit()

    def admit(self) -> None:
        """Give free slots to waiting requests, the oldest first."""
        if any(replica.is_live for replica in self._replicas):
            self._out_since = None
        if not self._waiting:
            return
        now = asyncio.get_running_loop().time()
        while self._waiting:
            free = [replica for replica in self._replicas if replica.takes_work(now)]
            if not free:
                break
            waiting = next(iter(self._waiting))
            self._leave(waiting)
            if waiting.assigned.done():  # aborted, and its caller has not run yet
                continue
            session = waiting.request.session_id
            home = self._homes.get(session)
            chosen = home if home in free else min(free, key=lambda replica: replica.load)
            self.num_moved += home is not None and home is not chosen
            self._homes[session] = chosen
            chosen.running[waiting.request.request_id] = waiting
            waiting.assigned.set_result(chosen)
        if self._waiting and not any(replica.is_live for replica in self._replicas):
            self._look_again(now)

    def forget(self, session_id: str) -> Replica | None:
        """Forget and return the server of an episode; None without one."""
        return self._homes.pop(session_id, None)

    def shuffle(self) -> None:
        """Order equally loaded servers at random, so that the pools of several workers do not all start with the first."""
        self._replicas = random.SystemRandom().sample(self._replicas, len(self._replicas))

    def close(self) -> None:
        """Stop the timer, and fail the requests that wait."""
        if self._timer is not None:
            self._timer.cancel()
        for waiting in list(self._waiting):
            self._leave(waiting)
            if not waiting.assigned.done():
                problem = f"the pool was closed while request {waiting.request.request_id!r} waited for a server"
                waiting.assigned.set_exception(EngineError(problem))

    def _leave(self, waiting: PooledRequest) -> None:
        self._waiting.pop(waiting, None)
        self.queue.set(len(self._waiting))

    def _withdraw(self, waiting: PooledRequest) -> None:
        """Remove an abandoned request from the queue, or release the slot it was just given."""
        if waiting.assigned.done() and not waiting.assigned.cancelled() and waiting.assigned.exception() is None:
            self.free(waiting.assigned.result(), waiting)
        else:
            self._leave(waiting)

    def _look_again(self, now: float) -> None:
        """Set a timer for the next server that may be tried; fail the requests that have waited too long."""
        are_gone = bool(self._replicas) and all(replica.is_gone for replica in self._replicas)
        why = "all servers are lost for good" if are_gone else f"no server was up for {self._patience_s:g} s"
        why += f" ({reasons(self._replicas)})"
        if self._out_since is None:
            self._out_since = now
        for waiting in list(self._waiting):
            waited_s = now - max(waiting.arrived, self._out_since)
            if not waiting.assigned.done() and (are_gone or waited_s >= self._patience_s):
                self._leave(waiting)
                waiting.assigned.set_exception(EngineLostError(why))
        if self._timer is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(FIRST_RETRY_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.admit()
