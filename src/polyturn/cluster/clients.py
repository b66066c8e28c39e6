"""Clients in the controller for the actors of ranks and workers (for engines: `actor_engine.py`).

    RayRankGroup    every rank runs a command on its share
    RayWorker       a worker of a `WorkerPool`

The report of a dead actor is one sentence and the end of its log, without Ray's stack trace. If a worker dies, another one
continues its episodes; the run ends if a rank or the last worker dies.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from polyturn.cluster.members import Member, answer
from polyturn.cluster.weights import StoredWeights
from polyturn.cluster.worker_pool import RemoteWorker, WorkerLostError
from polyturn.core.errors import PolyturnError, RankLostError
from polyturn.core.protocols import Engine
from polyturn.training.rank_group import values_of

_ERROR_S = 30.0
"""Seconds for which the other ranks may go on after a rank raised: they may wait for it in a collective."""


class RayRankGroup:
    """All trainer ranks. The controller is not a rank and holds no shard of the model."""

    def __init__(self, ranks: Sequence[Member], *, row_width: int, on_close: Callable[[], object]) -> None:
        self._on_close = on_close
        self._ranks = list(ranks)
        self._lock = threading.Lock()
        self.num_ranks = len(ranks)
        self.row_width = row_width
        self._lost: str | None = None

    def call(self, command: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Let every rank run `command` on its share, and return the results in the order of ranks.

        Raises:
            RankLostError: a rank is gone.
            PolyturnError: a rank raised it.
        """
        # The thread that writes checkpoints also sends commands, and all ranks must receive commands in the same order.
        with self._lock:
            pairs = zip(self._ranks, _stored(shares), strict=True)
            refs = [rank.handle.run.remote(command, share) for rank, share in pairs]
        waiting, values = list(refs), {}
        error: PolyturnError | None = None
        while waiting:  # in order of completion, because ranks that wait for a dead one never complete
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=None if error is None else _ERROR_S)
            if error is not None and not ready:  # such as a node without the model's folder
                raise error
            (done,) = ready
            try:
                values[done] = ray.get(done)
            except RayActorError as problem:
                self._lost = self._ranks[refs.index(done)].crash_report()
                raise RankLostError(self._lost) from problem
            except RayError as problem:
                dead = next((r for r in self._ranks if r.is_dead()), self._ranks[refs.index(done)])
                self._lost = f"{dead.crash_report()}\n({type(problem).__name__} during {command!r})"
                raise RankLostError(self._lost) from problem
            error = error or values[done].error
        return values_of([values[ref] for ref in refs])

    def lost(self) -> str | None:
        """Return the crash report if the last command found a rank gone, else None."""
        return self._lost

    def close(self) -> None:
        for rank in self._ranks:
            ray.kill(rank.handle)
        self._on_close()


def _stored(shares: Sequence[Any]) -> list[Any]:
    """Return the shares to send: a share for several ranks, such as those of a row, is put into Ray's object store once."""
    counts = Counter(map(id, shares))
    stored = {key: ray.put(share) for key, share in {id(one): one for one in shares}.items() if counts[key] > 1}
    return [stored.get(id(share), share) for share in shares]


class PushedWeights:
    """Publishes weights to engines on other nodes, which have separate copies of the weights."""

    def __init__(self, engine: Engine, weights: Callable[[], Mapping[str, Any]]) -> None:
        """Publish the result of `weights`; for a model with an adapter, this is only the adapter."""
        self._engine = engine
        self._weights = weights

    async def start(self, version: int) -> None:
        await self.publish(version)

    async def publish(self, version: int) -> None:
        stored = await asyncio.to_thread(lambda: StoredWeights.put(self._weights()))
        await self._engine.update_weights(version, weights=stored)


class RayWorker(RemoteWorker):
    """A rollout worker in an actor."""

    def __init__(self, member: Member) -> None:
        super().__init__(member.name)
        self._member = member

    async def call(self, method: str, *arguments: Any) -> Any:
        try:
            return await answer(getattr(self._member.handle, method).remote(*arguments))
        except RayActorError as problem:
            raise WorkerLostError(self._member.crash_report()) from problem

    async def end(self) -> None:
        ray.kill(self._member.handle)
