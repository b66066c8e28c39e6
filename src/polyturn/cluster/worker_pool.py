"""WorkerPool: runs groups on workers in other processes, with the interface of `RolloutPool`.

    WorkerPool.run_one(spec)  ->  the worker with the fewest episodes  ->  a group
                                  died?  ->  another worker, after the last complete turn of each episode
    EnginePool.on_change      ->  PoolView to every worker, if workers call the servers directly

A `RemoteWorker` is a Ray actor or a process of this machine.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import cloudpickle

from polyturn.cluster.journal import ResumeState, carry
from polyturn.core.errors import RankLostError
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.engines.following import PoolView
from polyturn.engines.pool import EnginePool
from polyturn.engines.replica import PoolUse, Replica
from polyturn.engines.update_gate import UpdateGate
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.journal import JournaledEpisode
from polyturn.rollout.pool import GroupSpec, LiveGroup, RolloutPool
from polyturn.training.journal_file import JournalFile

logger = logging.getLogger(__name__)


class WorkerLostError(RankLostError):
    """A rollout worker is gone; the message has the last lines of its log."""


class RemoteWorker(ABC):
    """A `RolloutWorker` in another process. All calls raise WorkerLostError once that process is gone."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the `RolloutWorker` and return its result; if the caller is cancelled, so is the call."""

    @abstractmethod
    async def end(self) -> None:
        """End the worker."""


def travelling(objects: Any) -> bytes:
    """Pickle an object for another process of this machine, which cannot import the program's main module."""
    data: bytes = cloudpickle.dumps(objects)
    return data


class WorkerPool(RolloutPool):
    """Runs groups on the workers."""

    def __init__(
        self,
        workers: Sequence[RemoteWorker],
        context: RolloutContext,
        *,
        max_concurrent: int,
        max_failed_share: float,
        engines: EnginePool | None = None,
    ) -> None:
        """Run groups on `workers`.

        With `engines`, the workers call its servers directly; without, they call the engine through this process.
        """
        super().__init__(context, max_concurrent=max_concurrent, max_failed_share=max_failed_share)
        self._engines = engines
        if engines is not None:
            engines.on_change = self._tell_workers
        self._beside: set[asyncio.Task[None]] = set()
        """Background tasks that send views and watch the servers."""
        self._loads = {worker.name: 0 for worker in workers}
        self._workers = {worker.name: worker for worker in workers}
        self._last_words = ""
        """The crash report of the worker that died last."""
        self._journal: JournalFile | None = None
        self._watched: list[Replica] = []
        """The engines from the first group until `close`; empty if the workers do not call them directly."""
        self._carriers: dict[str, asyncio.Task[None]] = {}

    def keep_in(self, journal: JournalFile) -> None:
        """Record the training episodes of all workers in `journal`, turn by turn; call this before the first group."""
        self._journal = journal

    async def _run(self, spec: GroupSpec, live: LiveGroup | None) -> TrajectoryGroup:
        """Run one group on a worker; if the worker dies, another one continues after each episode's last complete turn.

        Raises:
            RankLostError: the last worker died.
            EngineError: a server cannot be started.
        """
        if self._engines is not None:
            await self._engines.start()
        self._begin()
        resume_state = self._recall(spec, JournalFile.recall)
        while True:
            if not self._workers:
                raise RankLostError(f"no rollout worker is left. {self._last_words}")
            name = min(self._workers, key=lambda n: self._loads[n])
            self._loads[name] += spec.size
            worker = self._workers[name]
            if live is not None:
                live.abort_elsewhere = partial(_abort, worker, spec.id)
            try:
                view = None if self._engines is None else PoolView.of(self._engines)
                group: TrajectoryGroup
                use: PoolUse | None
                group, use = await worker.call("run", spec, resume_state, view)
                if self._engines is not None and use is not None:
                    self._engines.uses[name] = use
                return group
            except WorkerLostError as problem:
                await self._lose(name, problem)
                resume_state = self._recall(spec, JournalFile.recall_lost)
            finally:
                self._loads[name] -= spec.size

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Close the gate of this process, and those of workers that call the servers directly; see `UpdateGate`."""
        gate = self.context.engine
        assert isinstance(gate, UpdateGate)
        async with gate.closed():
            if self._engines is None:
                yield
                return
            self._engines.is_held = True
            try:
                await asyncio.gather(*self._tell_workers())
                yield
            finally:
                self._engines.is_held = False
                self._tell_workers()

    async def close(self) -> None:
        """End all workers, and close this process's pool."""
        self._watched.clear()
        for task in self._beside:
            task.cancel()
        for worker in self._workers.values():
            await worker.end()
        await super().close()

    def _tell_workers(self) -> list[asyncio.Task[None]]:
        """Send the current view of the engines to all workers; before the first group, which brings a view, do nothing."""
        assert self._engines is not None
        view = PoolView.of(self._engines)
        return [self._do_beside(_follow(worker, view)) for worker in self._workers.values() if self._watched]

    def _do_beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._end_beside)
        return task

    def _end_beside(self, task: asyncio.Task[None]) -> None:
        self._beside.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            logger.error("the engines of the rollout workers are not looked after any more", exc_info=problem)

    def _begin(self) -> None:
        """On the first call, start to watch the engines and to copy the workers' entries to the journal."""
        if self._engines is not None and not self._watched:
            self._watched += self._engines.replicas
            for replica in self._watched:
                self._do_beside(self._engines.watch(replica))
        if self._journal is not None and not self._carriers:
            for name, worker in self._workers.items():
                carrying = _carry_until_dead(self._journal, worker)
                self._carriers[name] = asyncio.create_task(carrying, name=f"journal of {name}")

    def _recall(self, spec: GroupSpec, recall: Callable[[JournalFile, str], JournaledEpisode | None]) -> ResumeState | None:
        """Return the journal's records of a group's episodes; None without a journal."""
        journal = self._journal
        if journal is None:
            return None
        states = {episode: recall(journal, episode) for episode in spec.episodes}
        return ResumeState({episode: state for episode, state in states.items() if state is not None}, journal.why_not)

    async def _lose(self, name: str, problem: WorkerLostError) -> None:
        if (worker := self._workers.pop(name, None)) is not None:
            self._last_words = str(problem)
            logger.error("%s\nRollout workers left, where its groups go on: %d", problem, len(self._workers))
            await worker.end()  # it may only have hung up, and its tools may have started processes
        if name in self._carriers:
            await asyncio.wait({self._carriers[name]})  # its last entries reach the journal before its episodes continue


async def _follow(worker: RemoteWorker, view: PoolView) -> None:
    with suppress(WorkerLostError):  # `_run` handles the loss
        await worker.call("follow", view)


async def _abort(worker: RemoteWorker, group: str) -> list[int]:
    lengths: list[int] = []
    with suppress(WorkerLostError):  # its episodes are lost too
        lengths = await worker.call("abort", group)
    return lengths


async def _carry_until_dead(journal: JournalFile, worker: RemoteWorker) -> None:
    try:
        await carry(journal, partial(worker.call, "posts"))
    except WorkerLostError:
        return
    except Exception:  # its episodes wait until their entries are taken, so they would wait forever
        logger.exception("%s is ended, because its journal entries cannot be recorded", worker.name)
        await worker.end()
