"""RolloutPool: runs groups, each the n trajectories of one task. It limits the number of live episodes, and ends a run in
which too many trajectories fail.

    GroupSpec(id="g12", task=…, size=8, seed=…)  ->  TrajectoryGroup of 8 trajectories g12/0 … g12/7

Training, evaluation and `polyturn rollout` all run groups through this class. Cancelling a call cancels its episodes, and
each of them still releases its resources.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Self

from polyturn.core.errors import RolloutError, most_common
from polyturn.core.generation import SamplingParams
from polyturn.core.seeds import derive_seed
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.infra.aio import first_error
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.episode import Episode
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.slots import EpisodeSlots


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """A group to run."""

    id: str
    task: Task
    size: int = 1
    seed: int = 0
    """Member m of the group is seeded by (seed, task, m), independently of the order in which episodes finish. Two groups of
    one task need different seeds, because equal seeds give equal episodes."""
    sampling: SamplingParams | None = None
    max_turns: int | None = None
    """Maximum number of turns of an episode; None for the run's limit."""
    has_baseline: bool = False
    """Whether the group has an additional greedily decoded episode, with which an estimator compares the members."""

    @property
    def episodes(self) -> list[str]:
        """The ids of its episodes."""
        names = [*range(self.size), *(["greedy"] if self.has_baseline else [])]
        return [f"{self.id}/{name}" for name in names]


@dataclass(slots=True, eq=False)
class LiveGroup:
    """The episodes of a group while it runs, so that a caller can abort it."""

    episodes: list[Episode] = field(default_factory=list)
    on_end: Callable[[Trajectory], None] | None = None
    """Called with each trajectory of this process as it ends, before the group is complete; not with the greedy baseline."""
    abort_elsewhere: Callable[[], Awaitable[list[int]]] | None = None
    """Aborts the episodes that run in another process, and returns their lengths in tokens; None if all run in this one."""
    is_cut: bool = False
    _lengths_elsewhere: list[int] = field(default_factory=list)

    async def abort(self) -> None:
        """Abort the completions that are being sampled, so that `lengths` counts their tokens."""
        self.is_cut = True
        for episode in self.episodes:
            await episode.resources.abort()
        if self.abort_elsewhere is not None:
            self._lengths_elsewhere = await self.abort_elsewhere()

    @property
    def lengths(self) -> list[int]:
        """The number of tokens that each episode has sampled so far; episodes of another process count after `abort`."""
        return [*(episode.resources.num_sampled for episode in self.episodes), *self._lengths_elsewhere]


class RolloutPool:
    """Runs groups with at most `max_concurrent` live episodes, or as many as the engine has room for (`EpisodeSlots`)."""

    def __init__(
        self,
        context: RolloutContext,
        *,
        max_concurrent: int = 256,
        min_concurrent: int | None = None,
        max_failed_share: float = 0.1,
        on_group: Callable[[TrajectoryGroup], None] | None = None,
    ) -> None:
        self.context = context
        self.failures = FailureBudget(max_share=max_failed_share)
        self._bounds = (max_concurrent, min_concurrent)
        self.slots = self._new_slots()
        self._on_group = on_group

    async def run_one(self, spec: GroupSpec, *, live: LiveGroup | None = None) -> TrajectoryGroup:
        """Run all members of one group, and return them in order of their index.

        Args:
            spec: The group.
            live: Receives the episodes as they start, and can abort them; an aborted group does not count as a failure.

        Raises:
            RolloutError: too large a share of the latest trajectories failed.
        """
        group = await self._run(spec, live)
        # Trajectories of an aborted group do not count as failures.
        if live is None or not live.is_cut:
            self.failures.count(group)
        if self._on_group is not None:
            self._on_group(group)
        return group

    def apart(self, *, on_group: Callable[[TrajectoryGroup], None] | None = None) -> Self:
        """Return a pool with the same context but separate slots and failure counts, such as for an evaluation."""
        other = copy.copy(self)
        other.failures = FailureBudget(max_share=self.failures.max_share)
        other.slots = self._new_slots()
        other._on_group = on_group
        return other

    def _new_slots(self) -> EpisodeSlots:
        most, least = self._bounds
        return EpisodeSlots(most=most, least=least, engine=self.context.engine)

    def read_metrics(self) -> dict[str, float]:
        """Return the current number of slots if it follows the engine's load, else nothing."""
        return {"rollout/concurrency": float(self.slots.limit)} if self.slots.least < self.slots.most else {}

    async def close(self) -> None:
        await self.context.close()

    async def _run(self, spec: GroupSpec, live: LiveGroup | None) -> TrajectoryGroup:
        limits = self.context.limits
        if spec.max_turns is not None:
            limits = dataclasses.replace(limits, max_turns=spec.max_turns)

        async def member(name: int | str, sampling: SamplingParams | None) -> Trajectory:
            async with self.slots:
                trajectory = await run_episode(
                    self.context,
                    spec.task,
                    id=f"{spec.id}/{name}",
                    seed=derive_seed(spec.seed, spec.task.id, name),
                    sampling=sampling,
                    limits=limits,
                    on_start=None if live is None else live.episodes.append,
                )
            if live is not None and live.on_end is not None and name != "greedy":
                live.on_end(trajectory)
            return trajectory

        with first_error():
            async with asyncio.TaskGroup() as tasks:
                members = [tasks.create_task(member(i, spec.sampling), name=f"{spec.id}/{i}") for i in range(spec.size)]
                greedy = dataclasses.replace(spec.sampling or self.context.sampling, temperature=0.0)
                baseline = tasks.create_task(member("greedy", greedy)) if spec.has_baseline else None
        return TrajectoryGroup(
            id=spec.id,
            task=spec.task,
            trajectories=tuple(m.result() for m in members),
            baseline=None if baseline is None else baseline.result(),
        )

    async def run(self, specs: Iterable[GroupSpec]) -> list[TrajectoryGroup]:
        """Run groups concurrently and return them in the order of `specs`."""
        with first_error():
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self.run_one(spec), name=spec.id) for spec in specs]
        self.failures.check_finished()
        return [task.result() for task in running]


class FailureBudget:
    """Counts failed trajectories and ends the run, with the reasons, when their share is too large.

    Only the latest trajectories count, so that a long healthy run still ends soon after its engine or its tools broke.
    """

    MIN_COUNT = 64
    """The share is taken of at least this many trajectories while others still run, because failed ones often end first."""
    MIN_FINISHED = 16
    """The share is taken of at least this many trajectories when all have ended."""
    WINDOW = 1024
    """Number of the latest trajectories that count."""

    def __init__(self, *, max_share: float) -> None:
        self.max_share = max_share
        self._latest: deque[str | None] = deque(maxlen=self.WINDOW)
        """The reason why each of the latest trajectories failed; None for a success."""
        self._has_success = False
        """Whether any trajectory succeeded."""

    def count(self, group: TrajectoryGroup) -> None:
        """Count one group.

        Raises:
            RolloutError: more than `max_share` of the latest trajectories failed; the message has the most common reasons.
        """
        for trajectory in group.trajectories:
            # Without the trajectory's id, so that failures with the same cause are counted together.
            reason = (trajectory.error or trajectory.stop_reason.value).replace(trajectory.id, "…")
            self._latest.append(reason if trajectory.is_failed else None)
            self._has_success |= not trajectory.is_failed
        self._check(of_at_least=self.MIN_COUNT)

    def check_finished(self) -> None:
        """Check the trajectories when all have ended.

        Raises:
            RolloutError: all failed, however few, or more than `max_share` of the latest; the message has the most common
                reasons.
        """
        if self._latest and not self._has_success:
            raise RolloutError(f"all {len(self._latest)} trajectories failed. Most common: {self._common()}")
        self._check(of_at_least=self.MIN_FINISHED)

    def _check(self, *, of_at_least: int) -> None:
        num_failed, num_total = sum(reason is not None for reason in self._latest), len(self._latest)
        if num_failed > self.max_share * max(num_total, of_at_least):
            raise RolloutError(
                f"{num_failed} of the latest {num_total} trajectories failed, more than rollout.max_failed_share = "
                f"{self.max_share:g} allows. Most common: {self._common()}"
            )

    def _common(self) -> str:
        return most_common(Counter(reason for reason in self._latest if reason is not None), 3)
