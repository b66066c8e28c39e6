"""The asynchronous training loop. Synchronous training is the same loop with `max_staleness` 0.

    producer   sampler -> slot of the buffer -> RolloutPool.run_one -> buffer
    consumer   buffer -> update (filters, samples, advantages, policy) -> new weights -> slots of the next step

The producer starts a group whenever the buffer grants a slot. The consumer takes one step's groups, trains, publishes the
new weights, and only then frees the slots.

In a synchronous run with the embedded engine, training blocks the event loop. Otherwise it runs in a thread while rollout
continues: the embedded engine pauses while its parameters change, an engine on the trainer's GPUs sleeps during the update.
A cancellation during an update takes effect after the update.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from polyturn.buffer.drop_stats import DropStats
from polyturn.buffer.group_buffer import GroupBuffer, Taken
from polyturn.buffer.staleness import Replay, check_staleness
from polyturn.core.errors import CheckpointError, RankLostError
from polyturn.core.seeds import derive_seed
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.data.sampler import TaskSampler
from polyturn.evaluation.evaluate import EvalResult, EvalSet, evaluate
from polyturn.evaluation.report import is_success, report
from polyturn.infra.aio import Finished, first_error
from polyturn.rollout.pool import RolloutPool
from polyturn.training.checkpoint import Checkpoints, Saver, SavingClock
from polyturn.training.journal_file import JournalFile
from polyturn.training.observer_base import Observer
from polyturn.training.producer import Producer
from polyturn.training.resume import identity_of, require_same_identity, warn_of_other_updates
from polyturn.training.rollout_metrics import state_metrics
from polyturn.training.state import Data, EngineLink, LoopSettings, LoopState, Saving
from polyturn.training.update import Update

logger = logging.getLogger(__name__)


class Trainer:
    """Runs the loop over the objects from `build`."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        update: Update,
        pool: RolloutPool,
        data: Data,
        engine: EngineLink,
        saving: Saving,
        observer: Observer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.state = LoopState()
        self.update = update
        self.policy = update.policy
        self._pool = pool
        self._data = data
        self._engine = engine
        self._saving = saving
        self._saver = Saver(saving.checkpoints)
        self._observer = observer
        self._new_sampler = data.sampler or partial(TaskSampler, len(data.tasks), seed=settings.seed)
        self._thread = engine.thread
        self._buffer: GroupBuffer | None = None
        self.is_abandoned: Callable[[], bool] = lambda: False
        """Whether the run must end at once, without a last checkpoint."""
        self._pending: list[int] = []
        self._training: list[int] = []
        """Tickets of the groups of the step under way."""
        self._saving_clock = SavingClock(settings.train.checkpoint_every_s, clock=clock)
        self._best_before = self.state.best, self.state.best_step
        """The best success and its step before the checkpoint that is being written."""
        self._replay = Replay(max_staleness=settings.train.max_staleness, seed=settings.seed)

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints of the run."""
        return self._saving.checkpoints

    async def run(self) -> LoopState:
        """Evaluate, train and evaluate again; write a checkpoint at the end, also when cancelled, unless `is_abandoned`.

        Raises:
            TrainingError, RolloutError: training cannot go on.
        """
        try:
            await self._engine.channel.start(self.state.step)
            await self._engine.snapshots.start(self.state.step)
            if self.state.step == 0:
                self._save()  # before any costly work, so that an unwritable disk ends the run now
                if self.settings.evaluation.before:
                    results = await self._evaluate(self._data.eval_sets)
                    self.state.reports["before"] = _reports(results)
                    # With on_checkpoint_error: warn, the first checkpoint may be missing.
                    if self.checkpoints.latest_step() == 0 and self._is_best(self._success(results)):
                        self.checkpoints.mark_best(self.state.step)
            if self.state.step < self.settings.train.steps:
                with first_error():
                    async with asyncio.TaskGroup() as tasks:
                        await self._train(tasks)
                self._pool.failures.check_finished()
            results = await self._evaluate(self._data.eval_sets)
            self.state.reports["after"] = _reports(results)
        except BaseException:
            if not self.is_abandoned():
                self._save_last_words()
            raise
        self._save(success=self._success(results), in_thread=False)
        self._settle_journal()
        return self.state

    def resume(self, path: Path) -> None:
        """Resume from a checkpoint of this run.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, of another model, or of another order of tasks.
        """
        saved = self.checkpoints.load(path)
        if missing := [name for name in ("fingerprint", "sampler", "policy", "loop") if name not in saved]:
            raise CheckpointError(
                f"the checkpoint {path} has no {missing[0]!r}, so no training run wrote it; resume from another one"
            )
        if saved["fingerprint"] != self._saving.fingerprint:
            raise CheckpointError(
                f"the checkpoint {path} was made with another tokenizer or chat template; resume with the one that made it"
            )
        # Load into a new sampler: loading raises if the tasks have another order, and it restores the weights that all
        # samplers of a mix share.
        self._sampler().load_state_dict(saved["sampler"])
        require_same_identity(saved.get("identity", {}), self._identity(), path=path)
        critic = [] if self.update.critic is None else [self.update.critic.settings.optim]
        warn_of_other_updates(saved, self.settings.train, [self.settings.train.optim, *critic])
        self.policy.load_state_dict(saved["policy"])
        self.update.load(path)
        self.update.load_state_dict(saved.get("update", {}))
        self._engine.snapshots.load_state_dict(saved.get("followers", {}))
        self.state = LoopState(**saved["loop"])
        self._pending = list(saved.get("pending", ()))
        if self._saving.journal is not None:
            self._saving.journal.resume(self.state.step, oldest=self._oldest_version)
        logger.info("resumed from %s at step %d", path, self.state.step)

    async def _train(self, tasks: asyncio.TaskGroup) -> None:
        """Run the remaining steps: a task fills the buffer, and each step takes its groups from the buffer."""
        train, state, drops = self.settings.train, self.state, DropStats()
        if self._is_validation_due() and (self._is_enough() if state.evaluated == state.step else await self._is_done()):
            return  # the resumed run ended before this validation finished, or because of it
        buffer = self._buffer = GroupBuffer(
            groups_per_step=train.groups_per_step,
            max_staleness=train.max_staleness,
            version=state.step,
            extra=train.extra_groups,
            carries=train.carries_over,
            pending=self._pending,
        )
        sampler, num_episodes = self._sampler(), train.groups_per_step * train.group_size
        limits = self._pool.context.limits
        logger.info(
            "a step has %d episodes, %d groups of %d, of at most %s turns and %s tokens a turn",
            num_episodes, train.groups_per_step, train.group_size,
            limits.max_turns or "any number of", limits.max_tokens_per_turn or "any number of",
        )  # fmt: skip
        producer = Producer(
            buffer,
            pool=self._pool,
            tasks=self._data.tasks,
            sampler=sampler,
            drops=drops,
            settings=self.settings,
            update=self.update,
            on_episode=partial(self._observer.on_episode, total=num_episodes),
        )
        num_groups = (train.steps - state.step) * buffer.tickets_per_step
        producing = tasks.create_task(producer.run(tasks, num_groups=num_groups), name="producer")
        try:
            while state.step < train.steps:
                began = time.perf_counter(), self._engine.busy_s()
                self._observer.begin_phase("rollout", num_episodes)
                taken = await buffer.take()
                self._training = taken.tickets
                if self._pool.failures.max_share < 1:  # with a share of 1 a run continues whatever fails
                    self._pool.failures.check_finished()
                # Before the update, so that the engine drops abandoned requests while the trainer computes.
                producer.cut(taken.left, tasks)
                await self._step(taken, sampler, drops, began=began)
                if await self._is_done():
                    break
                # Only after the validation: if slots were freed before, training groups would compete with it for the
                # engine.
                await buffer.advance(state.step)
        finally:
            # Recorded while the buffer still exists, for the final checkpoint, which is written later.
            self._pending = self._untrained()
            self._buffer = None
            producing.cancel()
            producer.stop()

    async def _step(self, taken: Taken, sampler: TaskSampler, drops: DropStats, *, began: tuple[float, float]) -> None:
        """Train on the groups of a step, publish the new weights, and record the step.

        `began` is the wall time and the engine's busy time, in seconds, at which the step began to wait for its groups.
        """
        train, state, groups = self.settings.train, self.state, taken.groups
        check_staleness(groups, step=state.step, max_staleness=train.max_staleness)
        replayed = self._replay.draw(train.replayed_groups, step=state.step)
        if self._engine.sleep is not None:
            await self._engine.sleep()
        if train.max_staleness == 0:  # otherwise the next step's rollout continues during the update
            self._observer.begin_phase("training", None)
        update = partial(self.update.run, [*groups, *replayed], step=state.step)
        # A cancellation waits for the end of the update, because a run cannot resume from the middle of an update.
        try:
            done = Finished(update(), None) if self._thread is None else await self._thread.finish(update)
        except Exception:
            self._observer.on_failed_step(state.step + 1, groups)
            raise
        (metrics, trained), cancelled = done
        # From here on the step counts as taken: whatever fails below, a checkpoint of this state does not repeat it.
        state.step += 1
        self._training = []
        if self._saving.journal is not None:
            metrics |= self._forget(self._saving.journal, taken)
        sampler.learn(_success(groups))
        sampler.observe(groups)
        try:
            if cancelled is not None:
                raise cancelled
            # Before slots are freed, so that no group of the next step starts under old weights.
            async with self._engine.closed():
                await self._engine.channel.publish(state.step)
            await self._engine.snapshots.follow(state.step)
        finally:  # the step was taken, so it is recorded even if the run is cancelled here
            metrics["time/step_s"] = time.perf_counter() - began[0]
            metrics |= state_metrics(groups, step_s=metrics["time/step_s"])
            metrics["time/generate_s"] = self._engine.busy_s() - began[1]
            metrics["time/other_share"] = _other_share(metrics)
            left_out = {id for id, record in trained.items() if record.dropped is not None}
            metrics |= {**self._engine.metrics(), **drops.read(groups, left_out=left_out)}
            if train.replayed_groups:
                self._replay.add(groups)
                metrics["buffer/groups_replayed"] = float(len(replayed))
            self._observer.on_step(state.step, metrics, groups, trained)

    def _identity(self) -> dict[str, Any]:
        return identity_of(self.settings.train, self._data.tasks, has_baseline=self.update.has_baseline)

    def _forget(self, journal: JournalFile, taken: Taken) -> Mapping[str, float]:
        """Remove from the journal the groups that were trained and the groups that were cut off; return its metrics."""
        oldest = self.state.step - 1 - self.settings.train.max_staleness  # the oldest version that the last step could train
        journal.forget(taken.tickets, oldest=oldest)
        journal.forget((slot.ticket for slot in taken.left), oldest=oldest, are_cut=True)
        return journal.read_metrics()

    def _untrained(self) -> list[int]:
        """Return the granted tickets that were not trained; a resumed run grants them first."""
        if self._buffer is None or not self.settings.train.carries_over:
            return self._pending
        return sorted([*self._buffer.pending, *self._training])

    def _sampler(self) -> TaskSampler:
        """Return a sampler at the first task that no step has trained on."""
        sampler, train = self._new_sampler(), self.settings.train
        wave = train.groups_per_step + (0 if train.carries_over else train.extra_groups)
        sampler.seek(self.state.step * wave)
        return sampler

    async def _is_done(self) -> bool:
        """Validate and save if due; return whether training ends."""
        evaluation, state = self.settings.evaluation, self.state
        if state.step >= self.settings.train.steps:
            return True
        sets = [s for s in self._data.eval_sets if s.is_periodic]
        is_best, is_enough, success = False, False, math.nan
        if sets and self._is_validation_due():
            results = await self._evaluate(sets, limit=evaluation.limit_during)
            success = self._success(results)
            is_best = success > state.best
            state.evals_since_best = 0 if is_best else state.evals_since_best + 1
            state.evaluated = state.step
            state.success = success
            is_enough = self._is_enough()
        every = self.settings.train.checkpoint_every
        is_due = isinstance(every, int) and every > 0 and state.step % every == 0
        if is_best or is_due or self._saving_clock.is_due():
            self._save(success=success)
        return is_enough

    def _is_enough(self) -> bool:
        """Return whether the latest validation ends training, and log why."""
        evaluation, state = self.settings.evaluation, self.state
        if evaluation.stop_at is not None and state.success >= evaluation.stop_at:
            logger.info("step %d: success %.3f reached evaluation.stop_at; training ends", state.step, state.success)
            return True
        if evaluation.patience is not None and state.evals_since_best >= evaluation.patience:
            logger.info("step %d: no better result in %d validations; training ends", state.step, evaluation.patience)
            return True
        return False

    def _is_best(self, success: float) -> bool:
        """Return whether the current weights, of this `success`, are the best so far; if so, record it."""
        state = self.state
        if not success > state.best:  # also for NaN, which cannot be compared
            return False
        state.best, state.best_step = success, state.step
        return True

    def _success(self, results: Mapping[str, EvalResult]) -> float:
        """Return the success on the first set that runs during training, which chooses the best checkpoint.

        It is computed over the tasks that every validation uses, so that validations are comparable.
        """
        chooser = next((s for s in self._data.eval_sets if s.is_periodic), None)
        if chooser is None:
            return math.nan
        limit = self.settings.evaluation.limit_during  # validations before and after training use more
        groups = results[chooser.name].groups[:limit]
        return report([t for g in groups for t in g.trajectories], success_at=chooser.success_at).success

    async def _evaluate(self, sets: Sequence[EvalSet], *, limit: int | None = None) -> dict[str, EvalResult]:
        out = {}
        for which in sets:
            total = len(which.tasks[:limit])
            self._observer.begin_phase(f"eval/{which.name}", total)
            tell = partial(self._observer.on_group, phase=f"eval/{which.name}", total=total)
            result = await evaluate(
                self._pool,
                which,
                limit=limit,
                seed=derive_seed(self.settings.seed, "eval"),
                on_group=tell,
            )
            self._observer.on_eval(self.state.step, which.name, result.report, result.groups)
            out[which.name] = result
        return out

    def _is_validation_due(self) -> bool:
        every, step = self.settings.evaluation.every, self.state.step
        return every > 0 and step > 0 and step % every == 0

    def _oldest_version(self, ticket: int) -> int:
        """Return the oldest policy version of tokens that a resumed run may train for the group of `ticket`."""
        train = self.settings.train
        if train.carries_over:
            return self.state.step  # the group gets its slot only now, so all its tokens will be from the current weights
        return ticket // (train.groups_per_step + train.extra_groups) - train.max_staleness

    def _save_last_words(self) -> None:
        """Save the run after an error or a cancellation, unless that happened in the middle of a step."""
        try:
            if self.update.is_half_done:
                self._saver.wait()
                logger.error(
                    "the run ended in the middle of step %d, so its current weights are not saved; resume from %s",
                    self.state.step + 1,
                    self.checkpoints.latest(),
                )
            else:
                self._save(in_thread=False)
                self._settle_journal()
        except (CheckpointError, RankLostError) as problem:
            logger.error("the latest steps are not saved: %s", problem)  # the error that ended the run is raised instead

    def _save(self, *, success: float = math.nan, in_thread: bool = True) -> None:
        """Save the run; `success` is that of the current weights, if they were evaluated.

        With `in_thread`, only start the save: the files are written while training continues.
        """
        step, exported = self.state.step, self.settings.train.export
        stops = self.settings.train.on_checkpoint_error == "stop"
        with self._saving_clock.saving():
            try:
                self._saver.wait()
            except CheckpointError as problem:  # of the previous checkpoint
                self._forget_best()
                if stops and in_thread:
                    raise
                logger.warning("%s; the run tries again now, at step %d", problem, step)
            self._best_before = self.state.best, self.state.best_step
            is_best = self._is_best(success)
            # The first weights may turn out to be the best: they are evaluated after this.
            is_exported = exported == "all" or not in_thread or (exported == "best" and (is_best or step == 0))
            state = {
                "policy": self.policy.state_dict(),
                "update": self.update.state_dict(),
                "loop": asdict(self.state),
                "sampler": self._sampler().state_dict(),
                "pending": self._untrained(),
                "fingerprint": self._saving.fingerprint,
                "identity": self._identity(),
                "updates_per_step": self.settings.train.updates_per_step,
            }
            if snapshots := self._engine.snapshots.state_dict(step):
                state["followers"] = snapshots
            # Begin the journal before the checkpoint is written, so that every checkpoint has a journal.
            if self._saving.journal is not None:
                self._saving.journal.begin(step, last=self.checkpoints.latest_step())
            try:
                export = self._saving.export if is_exported else None
                self._saver.save(step, state, stored=self.update.stored, export=export, is_best=is_best)
                if not in_thread or step == 0:  # wait for the first one, so that a killed run can resume
                    self._saver.wait()
            except CheckpointError as problem:
                self._forget_best()
                if stops or not in_thread:
                    raise
                logger.warning("%s; the run continues and tries again at the next checkpoint", problem)

    def _forget_best(self) -> None:
        """After a checkpoint could not be written, let the best result be that of the best checkpoint that exists."""
        self.state.best, self.state.best_step = self._best_before

    def _settle_journal(self) -> None:
        if self._saving.journal is not None:
            self._saving.journal.settle()


def _reports(results: Mapping[str, EvalResult]) -> dict[str, dict[str, float]]:
    return {name: asdict(result.report) for name, result in results.items()}


def _success(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Return the success rate of each data source that has rewards."""
    outcomes: dict[str, list[bool]] = {}
    for group in groups:
        scored = [t for t in group.trajectories if t.reward is not None or t.is_failed]
        outcomes.setdefault(group.task.data_source or "", []).extend(map(is_success, scored))
    return {source: sum(successes) / len(successes) for source, successes in outcomes.items() if successes}


def _other_share(metrics: Mapping[str, float]) -> float:
    """Return the share of a step's wall time outside generation, forward and backward passes."""
    wall = metrics["time/step_s"]
    return max(0.0, wall - metrics["time/generate_s"] - metrics["time/train_s"]) / wall if wall else 0.0
