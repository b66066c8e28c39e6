"""A group: the n trajectories of one task, run side by side and compared with one another.

GroupSpec(id="g12", task=…, size=8, seed=…)  ->  TrajectoryGroup of 8 trajectories g12/0 … g12/7
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from polyturn.core.aio import first_error
from polyturn.core.generation import SamplingParams
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.rollout.context import RolloutContext, derive_seed
from polyturn.rollout.episode import run_episode


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """A group that is to be run."""

    id: str
    task: Task
    size: int = 1
    seed: int = 0
    """Member m of the group is seeded by (seed, task, m): the order in which episodes finish changes nothing."""
    sampling: SamplingParams | None = None


async def run_group(
    context: RolloutContext, spec: GroupSpec, *, slots: AbstractAsyncContextManager[object]
) -> TrajectoryGroup:
    """Run all members of a group and return them in order of their index.

    Args:
        context: What the episodes of a run share.
        spec: The group.
        slots: Entered for the length of each episode, a semaphore of the pool.
    """

    async def member(index: int) -> Trajectory:
        async with slots:
            return await run_episode(
                context,
                spec.task,
                id=f"{spec.id}/{index}",
                seed=derive_seed(spec.seed, spec.task.id, index),
                sampling=spec.sampling,
            )

    with first_error():
        async with asyncio.TaskGroup() as group:
            members = [group.create_task(member(i), name=f"{spec.id}/{i}") for i in range(spec.size)]
    return TrajectoryGroup(id=spec.id, task=spec.task, trajectories=tuple(m.result() for m in members))
