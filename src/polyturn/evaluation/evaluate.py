"""Run a set of tasks the way training runs them, with other sampling or turn limits, and report.

Nothing here generates or scores by itself: an evaluation is a rollout of small groups, most often of one.
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
    pool: RolloutPool,
    which: EvalSet,
    *,
    limit: int | None = None,
    seed: int = 0,
    on_group: Callable[[TrajectoryGroup], None] | None = None,
    finish: Callable[[TrajectoryGroup], TrajectoryGroup] | None = None,
) -> EvalResult:
    """Run every task of `which` as often as it says, and return the report and the trajectories.

    Args:
        pool: Runs the episodes; the evaluation ends with an error when a larger share of them failed than it allows.
        which: The tasks and how they are decoded.
        limit: Use only the first `limit` tasks.
        seed: Seeds the sampling of every task.
        on_group: Called as each task is done, for progress.
        finish: Adds to the groups what is known beside the loop, such as what a server counted.

    Raises:
        RolloutError: too large a share of the trajectories failed.
    """
    of_set: Any = {"size": which.num_samples, "sampling": which.sampling, "max_turns": which.max_turns}
    groups = await pool.apart(on_group=on_group).run(
        GroupSpec(id=f"eval-{which.name}-{index}", task=task, seed=seed, **of_set)
        for index, task in enumerate(which.tasks[:limit])
    )
    groups = groups if finish is None else [finish(group) for group in groups]
    trajectories = [t for g in groups for t in g.trajectories]
    return EvalResult(report(trajectories, success_at=which.success_at), groups)
