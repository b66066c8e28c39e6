"""TaskSampler: an endless, seeded and resumable order of tasks.

    TaskSampler(3, seed=0):  (0, 2) (0, 0) (0, 1) | (1, 1) (1, 2) (1, 0) | ...        pairs of (epoch, task)

Its state in a checkpoint is five numbers, which determine the rest of an epoch. Each task comes exactly once per epoch, even
across a resume. A `Curriculum` chooses the tasks of each epoch:

    class EasyFirst(Curriculum):
        def choose(self, epoch):
            return [i for i, task in enumerate(self.tasks) if epoch >= 5 or task.extra["level"] == "easy"]
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyturn.core.errors import CheckpointError, DataError
from polyturn.core.task import Task
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.infra.plugin_shape import CallShape, Shape

OTHER_SAMPLER = "the checkpoint's tasks were drawn with another `data.sampler`; resume with the same one, or start a new run"


class Visit(NamedTuple):
    """One visit of a task."""

    epoch: int
    task: int
    """The index of the task in its dataset."""


class TaskSampler:
    """Visits `size` tasks, epoch after epoch, each epoch in its own order."""

    def __init__(self, size: int, *, seed: int, shuffle: bool = True) -> None:
        if size < 1:
            raise DataError(f"there are {size} tasks to sample from; at least 1 is needed")
        if seed < 0:
            raise DataError(f"the sampler's seed is {seed}; it must be 0 or more")
        self.size = size
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._number = 0
        """Number of visits so far."""
        self._order = self._permutation()

    def next(self) -> Visit:
        """Return the next visit."""
        if self._position == len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._permutation()
        index = int(self._order[self._position])
        self._position += 1
        self._number += 1
        return Visit(self._epoch, index)

    def at(self, number: int) -> Visit:
        """Return visit `number`, counted from the start, and continue after it."""
        if number != self._number:
            self.seek(number)
        return self.next()

    def instead(self, visit: Visit, *, number: int, attempt: int) -> int:
        """Return a replacement for the task of visit `number`, from the same epoch; each `attempt` draws another one."""
        # Depends on the visit's number only, so that the order in which groups finish does not matter.
        choice = self.choose(visit.epoch)
        return int(choice[random.Random(f"{self._seed}/{number}/{attempt}").randrange(len(choice))])

    def learn(self, success: Mapping[str, float]) -> None:
        """Receive the success rate of each data source in a step; an order that does not adapt ignores it."""

    def observe(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Receive the groups that a step was trained on; an order that does not adapt ignores them."""

    def choose(self, epoch: int) -> Sequence[int]:
        """Return the indices of an epoch's tasks before shuffling: each task once."""
        return range(self.size)

    def visits(self, epochs: int) -> int:
        """Return the number of visits in the first `epochs` epochs."""
        return sum(len(self.choose(epoch)) for epoch in range(epochs))

    def seek(self, visits: int) -> None:
        """Move to the position after `visits` visits from the start."""
        self._epoch, self._position, self._number = 0, visits, visits
        while self._position >= (size := len(self.choose(self._epoch))):
            if size == 0:
                raise DataError(empty(self._epoch))
            self._epoch, self._position = self._epoch + 1, self._position - size
        self._order = self._permutation()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "size": self.size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpointed state.

        Raises:
            CheckpointError: the state belongs to another dataset size, seed or order.
        """
        if "size" not in state:
            raise CheckpointError(OTHER_SAMPLER)
        for key, mine in (("size", self.size), ("seed", self._seed), ("shuffle", self._shuffle)):
            if state[key] != mine:
                raise CheckpointError(
                    f"the checkpoint's task order has {key} {state[key]!r}, but this run has {mine!r}; "
                    "resume with the same dataset and seed, or start a new run"
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._number = self.visits(self._epoch) + self._position
        self._order = self._permutation()

    def _permutation(self) -> NDArray[np.int64]:
        chosen = np.asarray(self.choose(self._epoch), dtype=np.int64)
        if not len(chosen):
            raise DataError(empty(self._epoch))
        if chosen.min() < 0 or chosen.max() >= self.size:
            wrong = int(chosen.max() if chosen.max() >= self.size else chosen.min())
            raise DataError(f"the sampler chose task {wrong} for epoch {self._epoch}; there are tasks 0 to {self.size - 1}")
        if not self._shuffle:
            return chosen
        # NumPy guarantees only the raw stream of a bit generator across releases.
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, self._epoch]))
        return chosen[np.argsort(bits.random_raw(len(chosen)), kind="stable")]


class Curriculum(TaskSampler):
    """A sampler with access to the tasks; a subclass chooses the tasks of each epoch.

    The result of `choose` may depend only on the epoch, the tasks and constants, because a resumed run calls it again and
    must get the same tasks. A task may be chosen more than once, or never.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int, shuffle: bool = True) -> None:
        self.tasks = tasks
        super().__init__(len(tasks), seed=seed, shuffle=shuffle)

    @classmethod
    def maker(cls, tasks: Sequence[Task], *, seed: int, shuffle: bool, **kwargs: Any) -> Callable[[], TaskSampler]:
        """Return a function that creates the sampler of a new run; `kwargs` are its arguments in `data.sampler`.

        Raises:
            TypeError: the class does not accept them.
        """
        inspect.signature(cls).bind(tasks, seed=seed, shuffle=shuffle, **kwargs)
        return functools.partial(cls, tasks, seed=seed, shuffle=shuffle, **kwargs)


CURRICULUM = Shape(
    what="a curriculum",
    needs=(("choose",),),
    bases=(Curriculum, TaskSampler),
    calls={"choose": CallShape(num=1, write="def choose(self, epoch)")},
)
"""The methods that a curriculum's class needs."""


def empty(epoch: int) -> str:
    """Return the message about an epoch without tasks."""
    return f"the sampler chose no task for epoch {epoch}; an epoch needs at least one"
