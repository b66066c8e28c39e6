"""RolloutWorker: the work of a process that only runs episodes, started by Ray (`actors.py`), or by the run's own
leader on this machine (`worker_process.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from polyturn.cluster.journal import JournalEntry, ResumeState, WorkerJournal
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.engines.following import FollowingPool, PoolView
from polyturn.engines.replica import PoolUse
from polyturn.rollout.pool import GroupSpec, LiveGroup, RolloutPool


class RolloutWorker:
    """Runs groups: the schedulers, tools, interactions and rewards of their episodes, and nothing of the training."""

    def __init__(self, build: Callable[[WorkerJournal], RolloutPool]) -> None:
        """Take what makes its parts, which happens with the first group."""
        self._build = build
        self._pool: RolloutPool | None = None
        self._journal = WorkerJournal()
        self._live: dict[str, LiveGroup] = {}
        self._lock = asyncio.Lock()

    async def run(
        self, spec: GroupSpec, resume_state: ResumeState | None, view: PoolView | None
    ) -> tuple[TrajectoryGroup, PoolUse | None]:
        """Run one group, and return it with the use of engines since the last report, where this process asks them itself.

        Args:
            spec: The group.
            resume_state: The leader's journal of its episodes.
            view: The leader's view of the engines, where this process asks them itself.
        """
        async with self._lock:
            if self._pool is None:
                self._pool = self._build(self._journal)
        if view is not None:
            await self.follow(view)
        self._journal.hand(resume_state)
        live = self._live[spec.id] = LiveGroup()
        try:
            group = await self._pool.run_one(spec, live=live)
        finally:
            del self._live[spec.id]
        engine = self._engine
        return group, None if engine is None else engine.use()

    async def follow(self, view: PoolView) -> None:
        """Ask the engines as the leader sees them."""
        if (engine := self._engine) is not None:  # before the first group, which comes with a view, there is none
            engine.follow(view)

    @property
    def _engine(self) -> FollowingPool | None:
        engine = None if self._pool is None else self._pool.context.engine
        return engine if isinstance(engine, FollowingPool) else None

    async def abort(self, group: str) -> list[int]:
        """End the completions of a group now, and return how many tokens each of its episodes has sampled."""
        if (live := self._live.get(group)) is None:
            return []
        await live.abort()
        return live.lengths

    async def posts(self, received: int) -> list[JournalEntry]:
        """Return the episodes' posts to the leader's journal, once there are any."""
        return await self._journal.posts(received)
