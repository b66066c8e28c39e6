"""The driver's side of ranks and workers, used like those of one process (engines: `actor_engine.py`).

    RayRankGroup    every rank runs a command on its share
    RayWorker       a worker of a `WorkerPool`

A dead actor is reported in one sentence with the end of its log, without Ray's stack trace. Another worker continues the
episodes of a dead one; the run ends if a rank or the last worker dies.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from polyturn.cluster.members import Member, answer
from polyturn.cluster.weights import StoredWeights
from polyturn.cluster.worker_pool import RemoteWorker, WorkerLostError
from polyturn.core.errors import RankLostError
from polyturn.core.protocols import Engine
from polyturn.training.rank_group import values_of


class RayRankGroup:
    """All trainer ranks; none of them is the leader, which keeps no shard."""

    def __init__(self, ranks: Sequence[Member], *, row_width: int, on_close: Callable[[], object]) -> None:
        self._on_close = on_close
        self._ranks = list(ranks)
        self._lock = threading.Lock()
        self.num_ranks = len(ranks)
        self.row_width = row_width
        self.is_elsewhere = True
        self._lost: str | None = None

    def call(self, command: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Let every rank run `command` on its share, and return the results in the order of ranks.

        Raises:
            RankLostError: a rank is gone.
            PolyturnError: what a rank raised.
        """
        with self._lock:  # a checkpoint is asked after from another thread, and all ranks must hear the same order
            refs = [rank.handle.run.remote(command, share) for rank, share in zip(self._ranks, shares, strict=True)]
        waiting, values = list(refs), {}
        while waiting:  # in the order in which they end: one that died would be waited for behind one that waits for it
            (done, *_), waiting = ray.wait(waiting, num_returns=1)
            try:
                values[done] = ray.get(done)
            except RayActorError as problem:
                self._lost = self._ranks[refs.index(done)].crash_report()
                raise RankLostError(self._lost) from problem
            except RayError as problem:
                dead = next((r for r in self._ranks if r.is_dead()), self._ranks[refs.index(done)])
                self._lost = f"{dead.crash_report()}\n({type(problem).__name__} during {command!r})"
                raise RankLostError(self._lost) from problem
        return values_of([values[ref] for ref in refs])

    def lost(self) -> str | None:
        """The reason that the last command gave, if a rank was gone."""
        return self._lost

    def close(self) -> None:
        """Let the ranks end, and give their places back."""
        for rank in self._ranks:
            ray.kill(rank.handle)
        self._on_close()


class PushedWeights:
    """The channel to engines that have weights of their own, on other nodes."""

    def __init__(self, engine: Engine, weights: Callable[[], Mapping[str, Any]]) -> None:
        """Push what `weights` returns: of an adapter's model the adapter alone."""
        self._engine = engine
        self._weights = weights

    async def start(self, version: int) -> None:
        """Bring the first weights there, as `version`."""
        await self.publish(version)

    async def publish(self, version: int) -> None:
        """Bring the weights as they are now, as `version`."""
        stored = await asyncio.to_thread(lambda: StoredWeights.put(self._weights()))
        await self._engine.update_weights(version, weights=stored)


class RayWorker(RemoteWorker):
    """A rollout worker in an actor."""

    def __init__(self, member: Member) -> None:
        super().__init__(member.name)
        self._member = member

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor."""
        try:
            return await answer(getattr(self._member.handle, method).remote(*arguments))
        except RayActorError as problem:
            raise WorkerLostError(self._member.crash_report()) from problem

    async def end(self) -> None:
        """End it."""
        ray.kill(self._member.handle)
