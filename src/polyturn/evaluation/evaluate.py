"""Runs a set of tasks in the same episodes as training, with its own sampling and turn limit, and reports the results.

An evaluation is a rollout of small groups, usually of one trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from polyturn.core.generation import SamplingParams
from polyturn.core.task import Task
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.evaluation.report import EvalReport, report
from polyturn.rollout.pool import GroupSpec, RolloutPool


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """A named set of tasks with sampling settings."""

    name: str
    tasks: Sequence[Task]
    sampling: SamplingParams
    max_turns: int | None = None
    """Replaces the run's turn limit; None keeps it."""
    num_samples: int = 1
    """Number of episodes per task."""
    is_periodic: bool = True
    """Whether the set is also evaluated during training."""
    success_at: float = 1.0


class EvalResult(NamedTuple):
    """The report and trajectories of an evaluation."""

    report: EvalReport
    groups: list[TrajectoryGroup]


async def evaluate(
    pool: RolloutPool,
    which: EvalSet,
    *,
    limit: int | None = None,
    seed: int = 0,
    on_group: Callable[[TrajectoryGroup], None] | None = None,
    finish: Callable[[TrajectoryGroup], TrajectoryGroup] | None = None,
) -> EvalResult:
    """Run every task of `which` and return the report and the trajectories.

    Args:
        pool: Runs the episodes.
        which: The tasks and their sampling settings.
        limit: Number of tasks to use, from the beginning; None uses all.
        seed: Seed of the sampling.
        on_group: Called after each finished task, for progress.
        finish: Adds information to each group, such as a server's token counts.

    Raises:
        RolloutError: a larger share of the trajectories failed than the pool allows.
    """
    of_set: Any = {"size": which.num_samples, "sampling": which.sampling, "max_turns": which.max_turns}
    groups = await pool.apart(on_group=on_group).run(
        GroupSpec(id=f"eval-{which.name}-{index}", task=task, seed=seed, **of_set)
        for index, task in enumerate(which.tasks[:limit])
    )
    groups = groups if finish is None else [finish(group) for group in groups]
    trajectories = [t for g in groups for t in g.trajectories]
    return EvalResult(report(trajectories, success_at=which.success_at), groups)
