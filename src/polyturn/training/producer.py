"""Producer: the half of the loop that starts groups when the buffer has a slot, and aborts groups that no step needs.

    ticket -> visit of a task -> group -> do its members differ? -> buffer
                                          no: another task in its place, a bounded number of times (dynamic sampling)

The ticket determines the replacement task, so the choice does not depend on which group finished first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from polyturn.buffer.drop_stats import DropStats
from polyturn.buffer.group_buffer import GroupBuffer, Slot
from polyturn.core.errors import EngineError, one_line
from polyturn.core.seeds import derive_seed
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory
from polyturn.data.sampler import TaskSampler, Visit
from polyturn.rollout.pool import GroupSpec, LiveGroup, RolloutPool
from polyturn.training.state import LoopSettings
from polyturn.training.update import Update

logger = logging.getLogger(__name__)

_ABORT_S = 5.0
"""Seconds to wait for an engine to return the partial completions of a group that is cut off."""


class _Started(NamedTuple):
    """A running group."""

    task: asyncio.Task[None]
    live: LiveGroup


class Producer:
    """Starts groups in the order of a sampler."""

    def __init__(
        self,
        buffer: GroupBuffer,
        *,
        pool: RolloutPool,
        tasks: Sequence[Task],
        sampler: TaskSampler,
        drops: DropStats,
        settings: LoopSettings,
        update: Update,
        on_episode: Callable[[], None],
    ) -> None:
        """Start groups for `buffer`.

        Args:
            buffer: Grants slots and takes finished groups.
            pool: Runs groups.
            tasks: The tasks, indexed by the sampler's visits.
            sampler: The sampler, at the first visit that no step has trained on.
            drops: Counts trajectories and tokens that are not trained.
            settings: The loop's settings: the size of a group, the seed, how often a group without signal is replaced.
            update: Decides whether a group has a baseline member, and whether it has a signal.
            on_episode: Called for every finished episode of a group that a step may train on.
        """
        self._buffer = buffer
        self._pool = pool
        self._tasks = tasks
        self._sampler = sampler
        self._drops = drops
        self._settings = settings
        self._update = update
        self._on_episode = on_episode
        self._started: dict[int, _Started] = {}
        self._cutting: set[asyncio.Task[None]] = set()

    async def run(self, tasks: asyncio.TaskGroup, *, num_groups: int) -> None:
        """Start `num_groups` groups, each when it gets a slot."""
        for _ in range(num_groups):
            ticket = await self._buffer.admit()
            visit = self._sampler.at(ticket)
            live = LiveGroup()
            task = tasks.create_task(self._fill(ticket, visit, live), name=f"g{ticket}")
            self._started[ticket] = _Started(task, live)

    def cut(self, left: Sequence[Slot], tasks: asyncio.TaskGroup) -> None:
        """Start cutting off the groups that no step needs, and count their tokens."""
        for slot in left:
            if slot.group is not None:
                self._drops.add_group(slot.group, reason="left_over")
            elif (started := self._started.pop(slot.ticket, None)) is not None:
                cutting = tasks.create_task(self._cut(started), name=f"cut g{slot.ticket}")
                self._cutting.add(cutting)
                cutting.add_done_callback(self._cutting.discard)

    def stop(self) -> None:
        """Cancel all running groups."""
        for task in (*(started.task for started in self._started.values()), *self._cutting):
            task.cancel()

    async def _fill(self, ticket: int, visit: Visit, live: LiveGroup) -> None:
        """Run groups until one has a signal or the attempts are used up, and put the last one into the buffer."""
        # Seeded by epoch, so that another visit of the task samples other trajectories.
        index, seed = visit.task, derive_seed(self._settings.seed, visit.epoch)
        max_attempts = self._settings.train.dynamic_sampling
        num_counted = 0

        def tell(trajectory: Trajectory) -> None:
            nonlocal num_counted
            num_counted += 1
            self._on_episode()

        if not max_attempts:  # with attempts, a group may be replaced, and its episodes then count for no step
            live.on_end = tell
        try:
            for attempt in range(max_attempts + 1):
                live.episodes.clear()
                spec = GroupSpec(
                    id=f"g{ticket}" if attempt == 0 else f"g{ticket}r{attempt}",
                    task=self._tasks[index],
                    size=self._settings.train.group_size,
                    has_baseline=self._update.has_baseline,
                    seed=seed if attempt == 0 else derive_seed(seed, ticket, attempt),
                )
                group = await self._pool.run_one(spec, live=live)
                if live.is_cut:  # its slot is gone, and `_cut` counts its tokens
                    return
                if attempt == max_attempts or self._update.has_signal(group):
                    break
                self._drops.add_group(group, reason="resampled")
                index = self._sampler.instead(visit, number=ticket, attempt=attempt)
            # Not yet reported: with dynamic sampling all episodes, and the episodes of a group that ran in another process.
            for _ in range(len(group.trajectories) - num_counted):
                self._on_episode()
            await self._buffer.put(ticket, group)
        finally:
            if not live.is_cut:  # `cut` has already removed a group that is cut off
                self._started.pop(ticket, None)

    async def _cut(self, started: _Started) -> None:
        try:
            # Abort before cancelling: the engine then returns the partial completions, which are counted.
            async with asyncio.timeout(_ABORT_S):
                await started.live.abort()
        except (TimeoutError, EngineError) as problem:
            logger.debug("the engine did not end the completions of a cut-off group (%s)", one_line(problem))
        finally:
            self._drops.add(started.live.lengths, reason="left_over")
            started.task.cancel()
