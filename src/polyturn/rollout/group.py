"""A group: the n trajectories of one task, run side by side and compared with one another.

GroupSpec(id="g12", task=…, size=8, seed=…)  ->  TrajectoryGroup of 8 trajectories g12/0 … g12/7
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from polyturn.core.aio import first_error
from polyturn.core.generation import SamplingParams
from polyturn.core.seeds import derive_seed
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.episode import Episode
from polyturn.rollout.run_episode import run_episode


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """A group that is to be run."""

    id: str
    task: Task
    size: int = 1
    seed: int = 0
    """Member m of the group is seeded by (seed, task, m): the order in which episodes finish changes nothing."""
    sampling: SamplingParams | None = None
    has_baseline: bool = False
    """Whether one more episode is decoded greedily beside the members, which an estimator compares them with."""

    @property
    def episodes(self) -> list[str]:
        """The ids of its episodes."""
        names = [*range(self.size), *(["greedy"] if self.has_baseline else [])]
        return [f"{self.id}/{name}" for name in names]


@dataclass(slots=True, eq=False)
class LiveGroup:
    """The episodes of a group while it runs, so that a caller can abort it."""

    episodes: list[Episode] = field(default_factory=list)
    abort_elsewhere: Callable[[], Awaitable[list[int]]] | None = None
    """Of a group whose episodes run in another process: aborts them there, and returns their lengths."""
    is_cut: bool = False
    _lengths_elsewhere: list[int] = field(default_factory=list)

    async def abort(self) -> None:
        """Let the engine end the completions that are being sampled, so that `lengths` counts what they had."""
        self.is_cut = True
        for episode in self.episodes:
            await episode.resources.abort()
        if self.abort_elsewhere is not None:
            self._lengths_elsewhere = await self.abort_elsewhere()

    @property
    def lengths(self) -> list[int]:
        """The tokens that each episode has sampled so far."""
        return [*(episode.resources.num_sampled for episode in self.episodes), *self._lengths_elsewhere]


async def run_group(
    context: RolloutContext,
    spec: GroupSpec,
    *,
    slots: AbstractAsyncContextManager[object],
    live: LiveGroup | None = None,
) -> TrajectoryGroup:
    """Run all members of a group and return them in order of their index.

    Args:
        context: What the episodes of a run share.
        spec: The group.
        slots: Entered for the length of each episode, a semaphore of the pool.
        live: Is told the episodes as they start.
    """

    async def member(name: int | str, sampling: SamplingParams | None) -> Trajectory:
        async with slots:
            return await run_episode(
                context,
                spec.task,
                id=f"{spec.id}/{name}",
                seed=derive_seed(spec.seed, spec.task.id, name),
                sampling=sampling,
                on_start=None if live is None else live.episodes.append,
            )

    with first_error():
        async with asyncio.TaskGroup() as group:
            members = [group.create_task(member(i, spec.sampling), name=f"{spec.id}/{i}") for i in range(spec.size)]
            greedy = dataclasses.replace(spec.sampling or context.sampling, temperature=0.0)
            one_more = group.create_task(member("greedy", greedy)) if spec.has_baseline else None
    return TrajectoryGroup(
        id=spec.id,
        task=spec.task,
        trajectories=tuple(m.result() for m in members),
        baseline=None if one_more is None else one_more.result(),
    )
