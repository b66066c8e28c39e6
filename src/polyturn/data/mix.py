"""TaskMix: an order of tasks that gives every data source its share of each step; shares may change over time.

    weights {"gsm8k": 3, "search": [[0, 0], [100, 1]]}      step 0:   8 of gsm8k    step 100:   6 of gsm8k, 2 of search

A weight is a number, or points (step, weight) that are interpolated linearly. With `by_success`, a source weighs more the
closer its success rate is to one half, where a group teaches most. Each source is visited in passes: every task once, in a
new order for each pass. Fractions of a task are carried over to the next step, so that the shares are exact in the long run.

The tasks of a step are fixed and stored when its first task is drawn, so a resumed run draws the same ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyturn.core.errors import CheckpointError, ConfigError, did_you_mean
from polyturn.core.task import Task
from polyturn.data.options import MixOptions
from polyturn.data.sampler import OTHER_SAMPLER, TaskSampler, Visit

MEMORY = 0.9
"""Share of the old value when a step updates a source's average success rate; the rest is the step's success rate."""
LEAST = 0.1
"""Factor on the weight of a source that always or never succeeds, if `by_success` is 1."""


@dataclass(slots=True, kw_only=True)
class MixState:
    """Visits and results of each source; shared by the samplers of a run and saved in checkpoints."""

    counts: list[list[int]] = field(default_factory=list)
    """[step][source] number of tasks."""
    rests: list[float] = field(default_factory=list)
    """[source] fraction of a task carried over to the next step."""
    success: dict[str, float] = field(default_factory=dict)
    """Source -> moving average of its success rate, in [0, 1]."""


class TaskMix(TaskSampler):
    """Visits the tasks of several data sources by weight."""

    def __init__(
        self,
        tasks: Sequence[Task],
        settings: MixOptions,
        *,
        per_step: int,
        seed: int,
        shuffle: bool = True,
        state: MixState | None = None,
    ) -> None:
        """Create a sampler for tasks with data sources.

        Args:
            tasks: The tasks.
            settings: The weights.
            per_step: Number of visits per step.
            seed: Seed of the order within each source and within each step.
            shuffle: Whether the tasks of a source come in random order.
            state: The state of an earlier sampler to continue from.

        Raises:
            ConfigError: a source has no weight, or a weight belongs to no source.
        """
        self._sources: dict[str, list[int]] = {}
        for index, task in enumerate(tasks):
            self._sources.setdefault(task.data_source or "", []).append(index)
        for name in settings.points:
            if name not in self._sources:
                raise ConfigError(
                    f"the mix has a weight for {name!r}, which no task has as its data_source."
                    f"{did_you_mean(name, self._sources)}"
                )
        for name, rows in self._sources.items():
            if name not in settings.points:
                raise ConfigError(
                    f"the sampler mix has no weight for the data_source {name!r} with {len(rows)} tasks; 0 leaves them out"
                )
        self._source_of = np.empty(len(tasks), np.int32)
        """[task] the index of its source."""
        for source, rows in enumerate(self._sources.values()):
            self._source_of[rows] = source
        self._settings = settings
        self._per_step = per_step
        self._state = state or MixState()
        self._before = [[0] * len(self._sources)]
        """[step][source] number of tasks in all earlier steps."""
        self._orders: dict[tuple[str, int], NDArray[np.int64]] = {}
        super().__init__(len(tasks), seed=seed, shuffle=shuffle)

    def next(self) -> Visit:
        """Return the next visit."""
        step, index_in_step = divmod(self._number, self._per_step)
        self._number += 1
        counts, before = self._counts_of(step), self._before[step]
        # Seeded by (seed, step), so that a run resumed within a step draws the remaining tasks in the same order.
        order = [source for source, count in enumerate(counts) for _ in range(count)]
        random.Random(f"{self._seed}/mix/{step}").shuffle(order)
        source = order[index_in_step]
        name = list(self._sources)[source]
        epoch, position = divmod(before[source] + order[:index_in_step].count(source), len(self._sources[name]))
        return Visit(epoch, int(self._order_of(name, epoch)[position]))

    def instead(self, visit: Visit, *, number: int, attempt: int) -> int:
        """Return a replacement for the task of visit `number`, from the same source."""
        source = list(self._sources.values())[self._source_of[visit.task]]
        return random.Random(f"{self._seed}/{number}/{attempt}").choice(source)

    def visits(self, epochs: int) -> int:
        """Refuse: a mix has no epochs."""
        raise ConfigError("the mix has no epochs, because its sources are visited at different rates; set train.steps")

    def seek(self, visits: int) -> None:
        """Move to the position after `visits` visits from the start."""
        self._number = visits

    def learn(self, success: Mapping[str, float]) -> None:
        """Update the average success rates with the success rates of a step."""
        for name, share in success.items():
            known = self._state.success.get(name, share)
            self._state.success[name] = MEMORY * known + (1 - MEMORY) * share

    def shares(self, step: int) -> dict[str, float]:
        """Return the share of each source in a step, from the current success rates."""
        weights = {name: max(0.0, _at(self._settings.points[name], step)) for name in self._sources}
        if self._settings.by_success:
            for name, known in self._state.success.items():
                weights[name] *= max(LEAST, 4 * known * (1 - known)) ** self._settings.by_success
        total = sum(weights.values())
        if not total:
            raise ConfigError(f"the sampler mix has only weights of 0 at step {step}; raise one")
        return {name: weight / total for name, weight in weights.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        state = self._state
        known = {
            "counts": [list(c) for c in state.counts],
            "rests": list(state.rests),
            "success": dict(state.success),
        }
        return {**self._identity(), "number": self._number, **known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpointed state.

        Raises:
            CheckpointError: the state belongs to other tasks or another seed.
        """
        if "sources" not in state:
            raise CheckpointError(OTHER_SAMPLER)
        mine = self._identity()
        for key, value in mine.items():
            if state.get(key) != value:
                raise CheckpointError(
                    f"the checkpoint's mix of tasks has {key} {state.get(key)!r}, but this run has {value!r}; resume with "
                    "the same tasks, seed and train.groups_per_step, or start a new run"
                )
        self._state.counts[:] = [list(counts) for counts in state["counts"]]
        self._state.rests[:] = state["rests"]
        self._state.success.clear()
        self._state.success.update(state["success"])
        self._number = int(state["number"])

    def _identity(self) -> dict[str, Any]:
        sizes = [[name, len(tasks)] for name, tasks in self._sources.items()]
        return {"sources": sizes, "seed": self._seed, "shuffle": self._shuffle, "per_step": self._per_step}

    def _counts_of(self, step: int) -> list[int]:
        """Return [source] the number of tasks in `step`; missing numbers of earlier steps are computed first."""
        counts = self._state.counts
        while len(self._before) <= step + 1:
            settled = len(self._before) - 1
            if settled == len(counts):
                counts.append(self._divide(settled))
            self._before.append([a + b for a, b in zip(self._before[-1], counts[settled], strict=True)])
        return counts[step]

    def _divide(self, step: int) -> list[int]:
        """Divide a step's visits by the current shares; fractions are carried over to the next step."""
        shares = list(self.shares(step).values())
        rests = self._state.rests or [0.0] * len(shares)
        owed = [share * self._per_step + rest if share else 0.0 for share, rest in zip(shares, rests, strict=True)]
        # Largest-remainder method: the source with the largest fraction gets the next whole visit.
        counts = [max(0, math.floor(o)) for o in owed]
        while (missing := self._per_step - sum(counts)) != 0:
            sign = 1 if missing > 0 else -1
            able = [i for i, share in enumerate(shares) if (share if sign > 0 else counts[i])]
            counts[max(able, key=lambda i: sign * (owed[i] - counts[i]))] += sign
        self._state.rests[:] = [o - count for o, count in zip(owed, counts, strict=True)]
        return counts

    def _order_of(self, name: str, epoch: int) -> NDArray[np.int64]:
        if (name, epoch) not in self._orders:
            tasks = np.asarray(self._sources[name], np.int64)
            if self._shuffle:
                words = [self._seed, epoch, list(self._sources).index(name)]
                bits = np.random.PCG64(np.random.SeedSequence(words))
                tasks = tasks[np.argsort(bits.random_raw(len(tasks)), kind="stable")]
            for key in [k for k in self._orders if k[0] == name and k[1] < epoch - 1]:
                del self._orders[key]
            self._orders[name, epoch] = tasks
        return self._orders[name, epoch]


def _at(points: Sequence[tuple[int, float]], step: int) -> float:
    """Return the weight at a step: linear between points, constant before the first and after the last."""
    steps, values = zip(*points, strict=True)
    return float(np.interp(step, steps, values))
