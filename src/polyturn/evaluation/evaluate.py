"""Run a set of tasks the way training runs them, with other sampling or turn limits, and report.

Nothing here generates or scores by itself: an evaluation is a rollout of small groups, most often of one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from polyturn.core.generation import SamplingParams
from polyturn.core.task import Task
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.evaluation.report import EvalReport, report
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.pool import GroupSpec, RolloutPool


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """One way to evaluate: a name, the tasks, and how they are decoded."""

    name: str
    tasks: Sequence[Task]
    sampling: SamplingParams
    max_turns: int | None = None
    """Overrides the run's turn limit; None keeps it."""
    num_samples: int = 1
    """Number of times that each task is run."""
    is_periodic: bool = True
    """Whether it also runs during training."""
    success_at: float = 1.0


class EvalResult(NamedTuple):
    """The result of an evaluation."""

    report: EvalReport
    groups: list[TrajectoryGroup]


async def evaluate(
    context: RolloutContext,
    which: EvalSet,
    *,
    max_concurrent: int = 256,
    max_failed_share: float = 0.1,
    limit: int | None = None,
    seed: int = 0,
    on_group: Callable[[TrajectoryGroup], None] | None = None,
    finish: Callable[[TrajectoryGroup], TrajectoryGroup] | None = None,
) -> EvalResult:
    """Run every task of `which` as often as it says, and return the report and the trajectories.

    Args:
        context: What the episodes share.
        which: The tasks and how they are decoded.
        max_concurrent: Live episodes at any moment.
        max_failed_share: The evaluation ends with an error when a larger share of its trajectories failed.
        limit: Use only the first `limit` tasks.
        seed: Seeds the sampling of every task.
        on_group: Called as each task is done, for progress.
        finish: Adds to the groups what is known beside the loop, such as what a server counted.

    Raises:
        RolloutError: too large a share of the trajectories failed.
    """
    if which.max_turns is not None:
        context = dataclasses.replace(context, limits=dataclasses.replace(context.limits, max_turns=which.max_turns))
    pool = RolloutPool(context, max_concurrent=max_concurrent, max_failed_share=max_failed_share, on_group=on_group)
    specs = [
        GroupSpec(id=f"eval-{which.name}-{index}", task=task, size=which.num_samples, seed=seed, sampling=which.sampling)
        for index, task in enumerate(which.tasks[:limit])
    ]
    groups = await pool.run(specs)
    groups = groups if finish is None else [finish(group) for group in groups]
    trajectories = [t for g in groups for t in g.trajectories]
    return EvalResult(report(trajectories, success_at=which.success_at), groups)
