"""RolloutWorker: the work of a process that only runs episodes, started by Ray (`actors.py`), or by the run's own
leader on this machine (`worker_process.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from polyturn.cluster.journal import JournalEntry, ResumeState, WorkerJournal
from polyturn.core.trajectory import TrajectoryGroup
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

    async def run(self, spec: GroupSpec, resume_state: ResumeState | None) -> TrajectoryGroup:
        """Run one group; `resume_state` is what the leader's journal has of its episodes."""
        async with self._lock:
            if self._pool is None:
                self._pool = self._build(self._journal)
        self._journal.hand(resume_state)
        live = self._live[spec.id] = LiveGroup()
        try:
            return await self._pool.run_one(spec, live=live)
        finally:
            del self._live[spec.id]

    async def abort(self, group: str) -> list[int]:
        """End the completions of a group now, and return how many tokens each of its episodes has sampled."""
        if (live := self._live.get(group)) is None:
            return []
        await live.abort()
        return live.lengths

    async def posts(self, received: int) -> list[JournalEntry]:
        """Return the episodes' posts to the leader's journal, once there are any."""
        return await self._journal.posts(received)
