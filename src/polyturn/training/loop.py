"""The training loop: one asynchronous loop, of which synchronous training is staleness 0.

    producer   sampler -> slot of the buffer -> run_group -> buffer
    consumer   buffer -> filters -> samples -> advantages -> policy -> new weights -> slots of the next step

The producer starts a group whenever the buffer grants a slot; the consumer takes one step's groups, trains, publishes the
new weights, and only then frees the slots. Training itself runs without giving up the event loop, so that no one samples
from half an update and a cancellation never lands in the middle of a step.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from polyturn.buffer.group_buffer import GroupBuffer
from polyturn.core.aio import first_error
from polyturn.core.errors import CheckpointError
from polyturn.core.task import Task
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.data.sampler import TaskSampler
from polyturn.evaluation.evaluate import EvalResult, EvalSet, evaluate
from polyturn.evaluation.report import EvalReport, report
from polyturn.rollout.context import derive_seed
from polyturn.rollout.group import GroupSpec
from polyturn.rollout.pool import RolloutPool
from polyturn.store.schema import Trained
from polyturn.training.checkpoint import Checkpoints
from polyturn.training.update import Update

logger = logging.getLogger(__name__)


class TrainObserver(Protocol):
    """Is told what happens, for the records and for a person to read. It decides nothing."""

    def on_group(self, group: TrajectoryGroup, *, phase: str, total: int) -> None:
        """A group is done; `phase` is "rollout" or "eval/<set>", `total` the number of groups of the phase."""

    def on_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[TrajectoryGroup],
        trained: Mapping[str, Trained],
    ) -> None:
        """A step is done; `trained` says by trajectory id what it made of each."""

    def on_eval(self, step: int, name: str, report: EvalReport, groups: Sequence[TrajectoryGroup]) -> None:
        """An evaluation set is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """How long and how much."""

    steps: int
    groups_per_step: int
    group_size: int
    seed: int = 0
    shuffle: bool = True
    max_staleness: int = 0
    eval_before: bool = True
    eval_every: int = 0
    eval_limit_during: int | None = None
    stop_at: float | None = None
    patience: int | None = None
    checkpoint_every: int = 0


@dataclass(slots=True, kw_only=True)
class LoopState:
    """Where a run is; what a checkpoint keeps beside the policy."""

    step: int = 0
    best: float = -math.inf
    best_step: int = -1
    evals_since_best: int = 0
    reports: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """"before" and "after" -> evaluation set -> its numbers."""


class WeightChannel(Protocol):
    """The way of the policy's weights to the engine."""

    async def start(self, version: int) -> object:
        """Bring the first weights there, as `version`."""

    async def publish(self, version: int) -> object:
        """Bring the weights as they are now, as `version`.

        Raises:
            EngineError: they did not arrive.
        """


class Trainer:
    """Runs the loop over live objects that `build` made."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        update: Update,
        channel: WeightChannel,
        pool: RolloutPool,
        tasks: Sequence[Task],
        eval_sets: Sequence[EvalSet],
        checkpoints: Checkpoints,
        export: Callable[[Path], object],
        observer: TrainObserver,
        engine_busy_s: Callable[[], float],
        engine_metrics: Callable[[], Mapping[str, float]] = dict,
        fingerprint: str = "",
        sampler: Callable[[], TaskSampler] | None = None,
    ) -> None:
        self.settings = settings
        self.state = LoopState()
        self.update = update
        self.policy = update.policy
        self._channel = channel
        self._pool = pool
        self._tasks = tasks
        self._eval_sets = list(eval_sets)
        self.checkpoints = checkpoints
        self._export = export
        self._observer = observer
        self._engine_busy_s = engine_busy_s
        self._engine_metrics = engine_metrics
        self._fingerprint = fingerprint
        self._new_sampler = sampler or partial(TaskSampler, len(tasks), seed=settings.seed, shuffle=settings.shuffle)
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> LoopState:
        """Evaluate, train, evaluate again; leave a checkpoint, also when cancelled.

        Raises:
            TrainingError, RolloutError: training cannot go on.
        """
        await self._channel.start(self.state.step)
        try:
            if self.state.step == 0:
                self._save()
                if self.settings.eval_before:
                    results = await self._evaluate(self._eval_sets)
                    self.state.reports["before"] = _reports(results)
                    if self._is_best(results):
                        self.checkpoints.mark_best(self.state.step)
            if self.state.step < self.settings.steps:
                with first_error():
                    async with asyncio.TaskGroup() as tasks:
                        await self._train(tasks)
            results = await self._evaluate(self._eval_sets)
            self.state.reports["after"] = _reports(results)
        except BaseException:
            try:
                self._save()
            except CheckpointError as problem:
                logger.error("%s", problem)  # what ended the run is the error to raise
            raise
        self._save(is_best=self._is_best(results))
        return self.state

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint of this run.

        Raises:
            CheckpointError: it is missing, damaged, of another model, or of another order of tasks.
        """
        saved = self.checkpoints.load(path)
        if saved["fingerprint"] != self._fingerprint:
            raise CheckpointError(
                f"the checkpoint {path} was made with another tokenizer or chat template; resume with the one that made it"
            )
        self._sampler().load_state_dict(saved["sampler"])
        self.policy.load_state_dict(saved["policy"])
        self.state = LoopState(**saved["loop"])
        logger.info("resumed from %s at step %d", path, self.state.step)

    async def _train(self, tasks: asyncio.TaskGroup) -> None:
        settings, state = self.settings, self.state
        buffer = GroupBuffer(
            groups_per_step=settings.groups_per_step, max_staleness=settings.max_staleness, version=state.step
        )
        producer = tasks.create_task(self._produce(buffer, tasks), name="producer")
        try:
            while state.step < settings.steps:
                clock = _StepClock(self._engine_busy_s)
                groups = await buffer.take()
                metrics, trained = self.update.run(groups, step=state.step)
                state.step += 1
                try:
                    await self._channel.publish(state.step)
                finally:  # the step was taken, so it is recorded, also when the run is cancelled here
                    metrics["time/step_s"], metrics["time/generate_s"] = clock.read()
                    metrics["time/other_share"] = _other_share(metrics)
                    metrics |= self._engine_metrics()
                    self._observer.on_step(state.step, metrics, groups, trained)
                if await self._is_done():
                    break
                await buffer.advance(state.step)
        finally:
            producer.cancel()
            for task in list(self._running):
                task.cancel()

    async def _produce(self, buffer: GroupBuffer, tasks: asyncio.TaskGroup) -> None:
        """Start a group whenever the buffer has a slot, in the order of the sampler."""
        settings = self.settings
        sampler = self._sampler()
        num_left = (settings.steps - self.state.step) * settings.groups_per_step

        async def run(ticket: int, spec: GroupSpec) -> None:
            group = await self._pool.run_one(spec)
            self._observer.on_group(group, phase="rollout", total=settings.groups_per_step)
            await buffer.put(ticket, group)

        for _ in range(num_left):
            ticket = await buffer.admit()
            visit = sampler.next()
            spec = GroupSpec(
                id=f"g{ticket}",
                task=self._tasks[visit.task],
                size=settings.group_size,
                seed=derive_seed(settings.seed, visit.epoch),
            )
            task = tasks.create_task(run(ticket, spec), name=spec.id)
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _sampler(self) -> TaskSampler:
        """Return the order of tasks, at the first one that no step so far was trained on."""
        sampler = self._new_sampler()
        sampler.seek(self.state.step * self.settings.groups_per_step)
        return sampler

    async def _is_done(self) -> bool:
        """Validate and save where it is time to; return whether training ends early."""
        settings, state = self.settings, self.state
        if state.step >= settings.steps:
            return True
        sets = [s for s in self._eval_sets if s.is_periodic]
        is_best = is_enough = False
        if sets and settings.eval_every and state.step % settings.eval_every == 0:
            results = await self._evaluate(sets, limit=settings.eval_limit_during)
            is_best = self._is_best(results)
            state.evals_since_best = 0 if is_best else state.evals_since_best + 1
            success = self._success(results)
            if settings.stop_at is not None and success >= settings.stop_at:
                logger.info("step %d: success %.3f reached evaluation.stop_at; training ends", state.step, success)
                is_enough = True
            elif settings.patience is not None and state.evals_since_best >= settings.patience:
                logger.info("step %d: no better result in %d validations; training ends", state.step, settings.patience)
                is_enough = True
        if is_best or (settings.checkpoint_every and state.step % settings.checkpoint_every == 0):
            self._save(is_best=is_best)
        return is_enough

    def _is_best(self, results: Mapping[str, EvalResult]) -> bool:
        """Return whether the weights as they are now did better than all before, and remember it if they did."""
        success, state = self._success(results), self.state
        if not success > state.best:  # also false for NaN: there is nothing to choose by
            return False
        state.best, state.best_step = success, state.step
        return True

    def _success(self, results: Mapping[str, EvalResult]) -> float:
        """Return the number that chooses the best checkpoint: success of the first set that runs during training.

        It is taken over the tasks that every validation uses, so that all are compared on the same ones.
        """
        chooser = next((s for s in self._eval_sets if s.is_periodic), None)
        if chooser is None:
            return math.nan
        groups = results[chooser.name].groups[: self.settings.eval_limit_during]
        return report([t for g in groups for t in g.trajectories], success_at=chooser.success_at).success

    async def _evaluate(self, sets: Sequence[EvalSet], *, limit: int | None = None) -> dict[str, EvalResult]:
        out = {}
        for which in sets:
            total = len(which.tasks[:limit])
            tell = partial(self._observer.on_group, phase=f"eval/{which.name}", total=total)
            result = await evaluate(
                self._pool.context,
                which,
                max_concurrent=self._pool.max_concurrent,
                max_failed_share=self._pool.failures.max_share,
                limit=limit,
                seed=derive_seed(self.settings.seed, "eval"),
                on_group=tell,
            )
            self._observer.on_eval(self.state.step, which.name, result.report, result.groups)
            out[which.name] = result
        return out

    def _save(self, *, is_best: bool = False) -> None:
        state = {
            "policy": self.policy.state_dict(),
            "loop": asdict(self.state),
            "sampler": self._sampler().state_dict(),
            "fingerprint": self._fingerprint,
        }
        self.checkpoints.save(self.state.step, state, export=self._export, is_best=is_best)


class _StepClock:
    """Wall time of a step, and how much of it the engine was busy."""

    def __init__(self, engine_busy_s: Callable[[], float]) -> None:
        self._engine_busy_s = engine_busy_s
        self._wall, self._engine = time.perf_counter(), engine_busy_s()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self._wall, self._engine_busy_s() - self._engine


def _reports(results: Mapping[str, EvalResult]) -> dict[str, dict[str, float]]:
    return {name: asdict(result.report) for name, result in results.items()}


def _other_share(metrics: Mapping[str, float]) -> float:
    """Return the share of a step's wall time outside generation, forward and backward."""
    wall = metrics["time/step_s"]
    return max(0.0, wall - metrics["time/generate_s"] - metrics["time/train_s"]) / wall if wall else 0.0
