"""The driver's side of ranks and workers: a rank group and a pool, used like those of one process (engine: `engine.py`).

    RayRankGroup    every rank runs a command on its share
    RayPool         a group goes to the worker with least to do

An actor that dies is a sentence with what is left of its log, never a stack trace of Ray. What a dead worker ran goes on at
another; only the last of them, and any rank, ends the run.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from polyturn.cluster.journal import ResumeState, carry
from polyturn.cluster.members import Member, own_words
from polyturn.core.errors import RankLostError
from polyturn.core.protocols import Engine
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.journal import JournaledEpisode
from polyturn.rollout.pool import GroupSpec, LiveGroup, RolloutPool
from polyturn.training.journal_file import JournalFile
from polyturn.training.rank_group import values_of

logger = logging.getLogger(__name__)


class RayRankGroup:
    """All trainer ranks; none of them is the leader, which keeps no shard."""

    def __init__(self, ranks: Sequence[Member], *, tensor_parallel: int, on_close: Callable[[], object]) -> None:
        self._on_close = on_close
        self._ranks = list(ranks)
        self._lock = threading.Lock()
        self.num_ranks = len(ranks)
        self.tensor_parallel = tensor_parallel

    def call(self, command: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Let every rank run `command` on its share, and return what each returned.

        Raises:
            RankLostError: a rank is gone.
            PolyturnError: what a rank raised.
        """
        with self._lock:  # a checkpoint is asked after from another thread, and all ranks must hear the same order
            refs = [rank.handle.run.remote(command, share) for rank, share in zip(self._ranks, shares, strict=True)]
        waiting = list(refs)
        while waiting:  # in the order in which they end: one that died would be waited for behind one that waits for it
            (done, *_), waiting = ray.wait(waiting, num_returns=1)
            try:
                ray.get(done)
            except RayActorError as problem:
                raise RankLostError(self._ranks[refs.index(done)].crash_report()) from problem
            except RayError as problem:
                dead = next((r for r in self._ranks if r.is_dead()), self._ranks[refs.index(done)])
                raise RankLostError(f"{dead.crash_report()}\n({type(problem).__name__} during {command!r})") from problem
        return values_of(ray.get(refs))

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
        await self._engine.update_weights(version, weights=self._weights())

    async def publish(self, version: int) -> None:
        """Bring the weights as they are now, as `version`."""
        await self._engine.update_weights(version, weights=self._weights())


class RayPool(RolloutPool):
    """Runs groups on the workers; evaluation, which the leader does, has the context."""

    def __init__(
        self, workers: Sequence[Member], context: RolloutContext, *, max_concurrent: int, max_failed_share: float
    ) -> None:
        super().__init__(context, max_concurrent=max_concurrent, max_failed_share=max_failed_share)
        self._loads = {worker.name: 0 for worker in workers}
        self._workers = {worker.name: worker for worker in workers}
        self._last_words = ""
        """Of the worker that died last."""
        self._journal: JournalFile | None = None
        self._carriers: dict[str, asyncio.Task[None]] = {}

    def keep_in(self, journal: JournalFile) -> None:
        """Let the episodes of training on all workers be kept in a journal, turn by turn; call it before the first group."""
        self._journal = journal

    async def run_one(self, spec: GroupSpec, *, live: LiveGroup | None = None) -> TrajectoryGroup:
        """Run one group on a worker; if that dies, go on with it on another, behind the last complete turn of each episode.

        Raises:
            RankLostError: the last worker died.
            RolloutError: too large a share of the latest trajectories failed.
        """
        self._carry()
        resume_state = self._recall(spec, JournalFile.recall)
        while True:
            if not self._workers:
                raise RankLostError(f"no rollout worker is left. {self._last_words}")
            name = min(self._workers, key=lambda n: self._loads[n])
            self._loads[name] += spec.size
            handle = self._workers[name].handle
            running = handle.run.remote(spec, resume_state)
            if live is not None:
                live.abort_elsewhere = partial(_abort, handle, spec.id)
            try:
                group: TrajectoryGroup = await running
                break
            except asyncio.CancelledError:
                ray.cancel(running)
                raise
            except RayTaskError as problem:
                raise own_words(problem) from None
            except RayActorError:
                await self._lose(name)
                resume_state = self._recall(spec, JournalFile.recall_lost)
            finally:
                self._loads[name] -= spec.size
        if live is None or not live.is_cut:
            self.failures.count(group)
        return group

    def _carry(self) -> None:
        """Let what the workers' episodes say be carried to the journal, from the first group on."""
        if self._journal is not None and not self._carriers:
            for name, worker in self._workers.items():
                carrying = _carry_until_dead(self._journal, worker)
                self._carriers[name] = asyncio.create_task(carrying, name=f"journal of {name}")

    def _recall(self, spec: GroupSpec, recall: Callable[[JournalFile, str], JournaledEpisode | None]) -> ResumeState | None:
        """Return what the journal holds of a group's episodes; None where no journal is kept."""
        journal = self._journal
        if journal is None:
            return None
        found = {episode: recall(journal, episode) for episode in spec.episodes}
        return ResumeState({episode: held for episode, held in found.items() if held is not None}, journal.why_not)

    async def _lose(self, name: str) -> None:
        worker = self._workers.pop(name, None)
        if worker is not None:
            self._last_words = worker.crash_report()
            logger.error("%s\nRollout workers left, where its groups go on: %d", self._last_words, len(self._workers))
        if name in self._carriers:
            await asyncio.wait({self._carriers[name]})  # what it said before it died is read by whoever goes on


async def _abort(handle: Any, group: str) -> list[int]:
    try:
        lengths: list[int] = await handle.abort.remote(group)
    except RayActorError:  # what it had is lost with it
        return []
    return lengths


async def _carry_until_dead(journal: JournalFile, worker: Member) -> None:
    try:
        await carry(journal, worker.handle.posts.remote)
    except RayActorError:
        return
    except Exception:  # its conversations would wait for ever
        logger.exception("%s is ended, because what it says of its conversations cannot be taken up", worker.name)
        ray.kill(worker.handle)
