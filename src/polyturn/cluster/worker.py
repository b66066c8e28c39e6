"""RolloutWorker: runs episodes in a separate process, started by Ray (`actors.py`) or, on one machine, by the controller
(`worker_process.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from polyturn.cluster.journal import JournalEntry, ResumeState, WorkerJournal
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.engines.following import FollowingPool, PoolView
from polyturn.engines.replica import PoolUse
from polyturn.engines.update_gate import UpdateGate
from polyturn.rollout.pool import GroupSpec, LiveGroup, RolloutPool


class RolloutWorker:
    """Runs groups: the schedulers, tools, interactions and rewards of their episodes, without training."""

    def __init__(self, build: Callable[[WorkerJournal], RolloutPool]) -> None:
        """Store `build`, which the first group calls to make the pool."""
        self._build = build
        self._pool: RolloutPool | None = None
        self._journal = WorkerJournal()
        self._live: dict[str, LiveGroup] = {}
        self._lock = asyncio.Lock()

    async def run(
        self, spec: GroupSpec, resume_state: ResumeState | None, view: PoolView | None
    ) -> tuple[TrajectoryGroup, PoolUse | None]:
        """Run one group.

        Args:
            spec: The group.
            resume_state: The controller's journal of the group's episodes; None if the controller keeps no journal.
            view: The controller's view of the engines; None if this process does not call them directly.

        Returns:
            The group, and this process's statistics of the engines, or None if it does not call them directly.
        """
        async with self._lock:
            if self._pool is None:
                self._pool = self._build(self._journal)
        if view is not None:
            self._apply(view)
        self._journal.hand(resume_state)
        live = self._live[spec.id] = LiveGroup()
        try:
            group = await self._pool.run_one(spec, live=live)
        finally:
            del self._live[spec.id]
        engine = self._engine
        return group, None if engine is None else engine.use()

    async def follow(self, view: PoolView) -> None:
        """Update the pool of engines to the controller's view; if requests are held back, return once none runs."""
        self._apply(view)
        if (gate := self._gate) is not None:
            await gate.drain()

    def _apply(self, view: PoolView) -> None:
        if (engine := self._engine) is None:  # before the first group, which brings a view
            return
        engine.follow(view)
        if (gate := self._gate) is not None:
            (gate.hold if engine.is_held else gate.release)()

    @property
    def _gate(self) -> UpdateGate | None:
        engine = None if self._pool is None else self._pool.context.engine
        return engine if isinstance(engine, UpdateGate) else None

    @property
    def _engine(self) -> FollowingPool | None:
        engine = None if self._pool is None else self._pool.context.engine
        engine = engine.engine if isinstance(engine, UpdateGate) else engine
        return engine if isinstance(engine, FollowingPool) else None

    async def abort(self, group: str) -> list[int]:
        """Abort the completions of a group, and return the number of tokens that each of its episodes has sampled."""
        if (live := self._live.get(group)) is None:
            return []
        await live.abort()
        return live.lengths

    async def posts(self, received: int) -> list[JournalEntry]:
        """Wait for journal entries of the episodes after number `received`, and return them for the controller's journal."""
        return await self._journal.posts(received)
