"""Task sequences: a length, indices from both ends and slices, whatever the tasks come from."""

from __future__ import annotations

import dataclasses

import pytest

from polyturn.core.messages import Message
from polyturn.core.task import Task
from polyturn.data.sequences import Changed, Joined, Subset
from support.refusals import refuses

TASKS = [Task(id=name, prompt=(Message(role="user", content="?"),)) for name in "abcdef"]
JOINED = Joined([TASKS[:2], [], TASKS[2:]])


def ids(tasks: object) -> str:
    return "".join(task.id for task in tasks)  # type: ignore[attr-defined]


def test_sequences_are_one_behind_the_other() -> None:
    assert len(JOINED) == 6 and ids(JOINED) == "abcdef"
    assert [JOINED[i].id for i in (0, 1, 2, 5, -1, -6)] == ["a", "b", "c", "f", "f", "a"]


def test_slice_is_a_list_of_tasks() -> None:
    assert ids(JOINED[1:4]) == "bcd" and ids(JOINED[::-2]) == "fdb" and JOINED[9:] == []


@pytest.mark.parametrize("index", [6, -7])
def test_index_beyond_the_ends_is_an_index_error(index: int) -> None:
    refuses(lambda: JOINED[index], IndexError, f"task {index} of 6")


def test_subset_and_changed_tasks_are_lazy() -> None:
    changed = Changed(TASKS, lambda task: dataclasses.replace(task, id=task.id.upper()))
    assert ids(Subset(changed, [4, 0])) == "EA" and Subset(changed, [4, 0])[-1].id == "A"
