"""Train step by step: `for step in polyturn.steps(…)` yields each step's samples before the update.

    the training thread   rollout -> samples, advantages -> waits -> loss, optimizer, weights -> the next rollout
    the caller's thread              the body of the `for`    ^

The caller may change the samples before the update. Checkpoints and records are the same as in other runs.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from polyturn.algorithms.advantages.assign import first_not_finite
from polyturn.api.signals import Signals, in_thread
from polyturn.core.arrays import Ids
from polyturn.core.errors import ConfigError, one_line
from polyturn.core.sample import TrainSample
from polyturn.core.trajectory import Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from polyturn.api.run import Run
    from polyturn.training.update import Revise, Revised


logger = logging.getLogger(__name__)


class TrainingStep:
    """A training step before its update. Set `groups`, `samples` or `advantages` to change what the update trains on."""

    # A misspelt attribute raises.
    __slots__ = ("_changed", "_done", "_failure", "_go", "_groups", "_samples", "_vocab_size", "metrics", "number")

    def __init__(
        self,
        number: int,
        groups: Sequence[TrajectoryGroup],
        samples: Sequence[TrainSample],
        metrics: Mapping[str, float],
        *,
        vocab_size: int,
    ) -> None:
        self.number = number
        """Number of the step, from 1 on."""
        self.metrics: dict[str, float] = dict(metrics)
        """Metrics of rollout and samples; after `update`, all metrics of the step."""
        self._groups, self._samples, self._vocab_size = groups, samples, vocab_size
        self._changed: str | None = None
        self._failure: Exception | None = None
        self._go, self._done = threading.Event(), threading.Event()

    def __repr__(self) -> str:
        return f"TrainingStep({self.number}: {len(self.groups)} groups, {len(self.samples)} samples)"

    @property
    def groups(self) -> Sequence[TrajectoryGroup]:
        """The groups of trajectories. If you set others, for instance with other rewards, advantages are computed again."""
        return tuple(self._groups)

    @groups.setter
    def groups(self, groups: Sequence[TrajectoryGroup]) -> None:
        _check_list("step.groups", groups, TrajectoryGroup, write="step.groups = step.groups[:2]")
        if len({group.id for group in groups}) != len(groups):
            raise ConfigError("step.groups has a group twice; give each once")
        for trajectory in (t for group in groups for t in group.trajectories):
            for segment in trajectory.segments:
                self._check_ids(f"step.groups: trajectory {trajectory.id!r}", segment.token_ids)
        self._change("groups")
        self._groups = list(groups)

    @property
    def trajectories(self) -> list[Trajectory]:
        """The trajectories of all groups."""
        return [trajectory for group in self._groups for trajectory in group.trajectories]

    @property
    def samples(self) -> Sequence[TrainSample]:
        """The training samples: for each segment that is trained, its ids, loss weights and advantages."""
        return tuple(self._samples)

    @samples.setter
    def samples(self, samples: Sequence[TrainSample]) -> None:
        _check_list("step.samples", samples, TrainSample, write="step.samples = [s for s in step.samples if …]")
        if (bad := first_not_finite(samples)) is not None:
            raise ConfigError(f"step {self.number} has {bad}; give a finite number for each token")
        for sample in samples:
            self._check_ids(f"step.samples: {sample.id}", sample.token_ids)
        self._change("samples")
        self._samples = list(samples)

    @property
    def advantages(self) -> Sequence[Any]:
        """For each sample [T] the advantage of each token; set arrays of the same shapes."""
        return tuple(sample.advantages for sample in self._samples)

    @advantages.setter
    def advantages(self, advantages: Sequence[Any]) -> None:
        write = "step.advantages = [2 * a for a in step.advantages]"
        num = len(advantages) if isinstance(advantages, Sequence | np.ndarray) else None
        if num != len(self._samples):
            has = f"is a {type(advantages).__name__}" if num is None else f"has {num} entries"
            raise ConfigError(
                f"step.advantages {has} and the step {len(self._samples)} samples; give one array for each: {write}"
            )
        for number, (sample, values) in enumerate(zip(self._samples, advantages, strict=True)):
            shape, num_tokens = np.shape(values), len(sample.token_ids)
            if values is not None and shape != (num_tokens,):
                raise ConfigError(
                    f"step.advantages[{number}] has the shape {shape} and its sample {num_tokens} tokens; give a number for "
                    f"each token: {write}"
                )
        pairs = zip(self._samples, advantages, strict=True)
        self.samples = [sample.replace(advantages=values) for sample, values in pairs]

    def update(self) -> dict[str, float]:
        """Run the update now, and return all metrics of the step. Without this call it runs when the loop continues.

        Raises:
            PolyturnError: training cannot continue.
        """
        self._go.set()
        self._done.wait()
        if self._failure is not None:
            raise self._failure
        return self.metrics

    def _change(self, what: str) -> None:
        if self._go.is_set():
            raise ConfigError(f"the update of step {self.number} has begun; set step.{what} before step.update()")
        if self._changed not in (None, what):
            raise ConfigError(
                f"step {self.number} already has new {self._changed}, which new {what} would replace; samples are made from "
                "groups, so set only one of the two"
            )
        self._changed = what

    def _check_ids(self, what: str, ids: Ids) -> None:
        if (outside := ids[(ids < 0) | (ids >= self._vocab_size)]).size:
            raise ConfigError(
                f"{what} has the token id {outside[0]}, which is outside the vocabulary; give ids from 0 to "
                f"{self._vocab_size - 1}"
            )

    def _revised(self) -> Revised:
        from polyturn.training.update import Revised

        return Revised(
            self._groups if self._changed == "groups" else None, self._samples if self._changed == "samples" else None
        )


def _check_list(what: str, value: Any, of: type, *, write: str) -> None:
    if not isinstance(value, Sequence):
        raise ConfigError(f"{what} is a {type(value).__name__}; give a list, which may be empty: {write}")
    if bad := [one for one in value if not isinstance(one, of)]:
        raise ConfigError(f"{what} has a {type(bad[0]).__name__}; give {of.__name__}s: {write}")


class Steps:
    """The steps of a run. Iterate over them once; afterwards the property `run` has the finished run."""

    def __init__(self, work: Callable[[StepHooks], Run]) -> None:
        """Iterate over the steps of `work`, which runs the training with the given hooks."""
        self._work = work
        self._result: Future[Run] | None = None

    def __iter__(self) -> Iterator[TrainingStep]:
        """Train, and yield each step before its update. Leaving the loop ends the run after the current step.

        Raises:
            ConfigError: the steps were iterated over before.
            PolyturnError: training cannot continue.
        """
        if self._result is not None:
            raise ConfigError(
                "these steps have been iterated over; make new ones: for step in polyturn.steps(…, resume=True)"
            )
        hooks = StepHooks()
        self._result = in_thread(lambda: self._work(hooks))
        self._result.add_done_callback(hooks.end)
        try:
            while (step := hooks.steps.get()) is not None:
                yield step
                step._go.set()
            self._result.result()
        finally:
            if not self._result.done():
                hooks.stop()
                problem = self._result.exception()  # waits: the run ends with a checkpoint
                if isinstance(problem, Exception):
                    logger.error("the run failed after its loop was left: %s", one_line(problem))

    @property
    def run(self) -> Run:
        """The finished run.

        Raises:
            ConfigError: the run is not finished, or failed.
        """
        result = self._result
        problem = result.exception() if result is not None and result.done() else None
        if isinstance(problem, Exception):
            raise ConfigError(
                f"the run failed: {one_line(problem)}; resume it: for step in polyturn.steps(…, resume=True)"
            ) from problem
        if result is None or not result.done() or problem is not None:
            raise ConfigError("the run is not finished; iterate over its steps first: for step in steps: …")
        return result.result()


class StepHooks:
    """Passes steps from the training thread to the caller's thread."""

    def __init__(self) -> None:
        self.steps: queue.SimpleQueue[TrainingStep | None] = queue.SimpleQueue()
        self._now: TrainingStep | None = None
        self._signals: list[Signals] = []
        self._is_over = False

    def signals(self) -> Signals:
        """Make the run's `Signals`, with which `stop` ends the run when the caller leaves the loop."""
        self._signals.append(Signals())
        if self._is_over:  # the caller left while the run was loading
            self._signals[-1].note(signal.SIGTERM)
        return self._signals[-1]

    def revise(self, vocab_size: int) -> Revise:
        """Return a function that passes a step to the caller and waits for the changes; the training thread calls it."""

        def hand_over(
            taken: int, groups: Sequence[TrajectoryGroup], samples: Sequence[TrainSample], metrics: Mapping[str, float]
        ) -> Revised:
            self._now = step = TrainingStep(taken + 1, groups, samples, metrics, vocab_size=vocab_size)
            if not self._is_over:
                self.steps.put(step)
                step._go.wait()
            return step._revised()

        return hand_over

    def on_step(self, number: int, metrics: Mapping[str, float]) -> None:
        """Set the metrics of a finished step."""
        if self._now is not None:
            self._now.metrics.update(metrics)
            self._now._done.set()

    def stop(self) -> None:
        """End the run after the current step."""
        self._is_over = True
        for noted in self._signals[-1:]:
            noted.note(signal.SIGTERM)
        if self._now is not None:
            self._now._go.set()

    def end(self, result: Future[Any]) -> None:
        """Signal that no step follows."""
        if self._now is not None and not self._now._done.is_set():
            problem = result.exception()
            self._now._failure = problem if isinstance(problem, Exception) else None
            self._now._done.set()
        self.steps.put(None)
