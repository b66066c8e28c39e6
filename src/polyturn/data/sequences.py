"""TaskSequence: tasks that are created or changed only on access, and ways to combine sequences of tasks.

    WithSystem(Subset(TaskDataset.open("train.parquet", split="train"), [4, 7]), "Be brief.")[1]   ->  Task(id="train-7", …)

The base class implements slices and negative indices; a subclass defines only the length and how to get one task.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import overload

from polyturn.core.messages import Message, Origin
from polyturn.core.task import InteractionRef, Task


class TaskSequence(Sequence[Task]):
    """Tasks created on access; a subclass has `__len__` and `_task`."""

    @abstractmethod
    def _task(self, index: int) -> Task:
        """Return task `index`, in `range(len(self))`."""

    def where(self, index: int) -> str:
        """Return the file and the line or row of task `index`, or its number, for messages."""
        return f"number {index}"

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self._task(i) for i in range(len(self))[index]]
        if not -len(self) <= index < len(self):
            raise IndexError(f"task {index} of {len(self)}")
        return self._task(index % len(self))

    def __iter__(self) -> Iterator[Task]:
        return (self._task(i) for i in range(len(self)))


class Changed(TaskSequence):
    """Tasks with a change applied on access."""

    def __init__(self, tasks: Sequence[Task], change: Callable[[Task], Task]) -> None:
        self._tasks = tasks
        self._change = change

    def __len__(self) -> int:
        return len(self._tasks)

    def where(self, index: int) -> str:
        return self._tasks.where(index) if isinstance(self._tasks, TaskSequence) else super().where(index)

    def _task(self, index: int) -> Task:
        return self._change(self._tasks[index])


class WithSystem(Changed):
    """Tasks with a system message added if they have none."""

    def __init__(self, tasks: Sequence[Task], system: str) -> None:
        self._message = Message(role="system", content=system, origin=Origin.OWNER)
        super().__init__(tasks, self._with)

    def _with(self, task: Task) -> Task:
        if task.prompt[0].role in ("system", "developer"):
            return task
        return dataclasses.replace(task, prompt=(self._message, *task.prompt))


class WithInteraction(Changed):
    """Tasks with the interaction `name` added if they have none; the rest of the row becomes its arguments."""

    def __init__(self, tasks: Sequence[Task], name: str) -> None:
        self._name = name
        super().__init__(tasks, self._with)

    def _with(self, task: Task) -> Task:
        if task.interaction is not None:
            return task
        truth = {} if task.ground_truth is None else {"ground_truth": task.ground_truth}
        ref = InteractionRef(name=self._name, kwargs={**truth, **task.extra, "name": self._name})
        return dataclasses.replace(task, interaction=ref)


class Subset(TaskSequence):
    """Some of the tasks of a sequence."""

    def __init__(self, tasks: Sequence[Task], indices: Sequence[int]) -> None:
        self._tasks = tasks
        self._indices = list(indices)

    def __len__(self) -> int:
        return len(self._indices)

    def where(self, index: int) -> str:
        number = self._indices[index]
        return self._tasks.where(number) if isinstance(self._tasks, TaskSequence) else f"number {number}"

    def _task(self, index: int) -> Task:
        return self._tasks[self._indices[index]]


class Joined(TaskSequence):
    """The tasks of several sequences, one after another."""

    def __init__(self, parts: Sequence[Sequence[Task]]) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(len(p) for p in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _task(self, index: int) -> Task:
        part = bisect.bisect_right(self._ends, index)
        return self._parts[part][index - (self._ends[part - 1] if part else 0)]
