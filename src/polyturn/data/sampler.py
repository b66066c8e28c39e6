"""TaskSampler: the endless order in which tasks are visited, seeded and resumable.

    TaskSampler(3, seed=0):  (0, 2) (0, 0) (0, 1) | (1, 1) (1, 2) (1, 0) | ...        pairs of (epoch, task)

Separate so that the order is a value that a checkpoint can hold: five numbers, from which the rest of an epoch follows.
In every epoch each task comes exactly once, also across a resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyturn.core.errors import CheckpointError, DataError


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
        self._order = self._permutation()

    def next(self) -> Visit:
        """Return the next visit."""
        if self._position == self.size:
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._permutation()
        index = int(self._order[self._position])
        self._position += 1
        return Visit(self._epoch, index)

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on from here."""
        return {
            "size": self.size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was called.

        Raises:
            CheckpointError: the state is of another dataset size, seed or order.
        """
        for key, mine in (("size", self.size), ("seed", self._seed), ("shuffle", self._shuffle)):
            if state[key] != mine:
                raise CheckpointError(
                    f"the checkpoint's task order has {key} {state[key]!r} and this run has {mine!r}; "
                    "resume with the same dataset and seed, or start a new run"
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._permutation()

    def _permutation(self) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(self.size)
        # The raw stream of a bit generator is the part of NumPy's randomness that stays the same from release to release.
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, self._epoch]))
        return np.argsort(bits.random_raw(self.size), kind="stable")
