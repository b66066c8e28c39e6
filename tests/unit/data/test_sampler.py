"""The order of tasks: each exactly once an epoch, the same for the same seed, and resumable anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.build.tasks import build_sampler
from polyturn.config.config_source import ConfigSource
from polyturn.config.models import DataConfig, RunConfig
from polyturn.core.errors import CheckpointError, ConfigError, DataError
from polyturn.core.task import InteractionRef, Task
from polyturn.data.sampler import Curriculum, TaskSampler
from support.refusals import refuses


@given(size=st.integers(1, 40), seed=st.integers(0, 2**32), epochs=st.integers(1, 4), shuffle=st.booleans())
def test_every_epoch_visits_every_task_exactly_once(size: int, seed: int, epochs: int, shuffle: bool) -> None:
    sampler = TaskSampler(size, seed=seed, shuffle=shuffle)
    visits = [sampler.next() for _ in range(size * epochs)]
    for epoch in range(epochs):
        assert sorted(v.task for v in visits if v.epoch == epoch) == list(range(size))
    assert [v.epoch for v in visits] == sorted(v.epoch for v in visits)


@given(size=st.integers(1, 30), seed=st.integers(0, 99), before=st.integers(0, 70), after=st.integers(1, 70))
def test_resumed_order_is_exactly_the_rest(size: int, seed: int, before: int, after: int) -> None:
    whole = TaskSampler(size, seed=seed)
    expected = [whole.next() for _ in range(before + after)][before:]
    first = TaskSampler(size, seed=seed)
    for _ in range(before):
        first.next()
    second = TaskSampler(size, seed=seed)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [second.next() for _ in range(after)] == expected


def test_order_is_pinned_across_machines() -> None:
    """Users rely on this: an order that changed would repeat and skip tasks after a resume."""
    sampler = TaskSampler(8, seed=17)
    assert [sampler.next().task for _ in range(8)] == PINNED


PINNED = [1, 4, 3, 5, 6, 2, 7, 0]


def test_epochs_and_seeds_differ() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        sampler = TaskSampler(50, seed=seed)
        return [sampler.next().task for _ in range(50 * (number + 1))][-50:]

    assert epoch(0, 0) != epoch(0, 1)
    assert epoch(0, 0) != epoch(1, 0)


def test_unshuffled_tasks_keep_their_order() -> None:
    sampler = TaskSampler(3, seed=0, shuffle=False)
    assert [tuple(sampler.next()) for _ in range(4)] == [(0, 0), (0, 1), (0, 2), (1, 0)]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (TaskSampler(4, seed=1), "size 5, but this run has 4"),
        (TaskSampler(5, seed=2), "seed 1, but this run has 2"),
        (TaskSampler(5, seed=1, shuffle=False), "shuffle True, but this run has False"),
    ],
)
def test_state_of_another_order_is_refused(other: TaskSampler, says: str) -> None:
    refuses(lambda: other.load_state_dict(TaskSampler(5, seed=1).state_dict()), CheckpointError, says)


def test_no_tasks_and_negative_seed_are_refused() -> None:
    refuses(lambda: TaskSampler(0, seed=0), DataError, "there are 0 tasks")
    refuses(lambda: TaskSampler(3, seed=-1), DataError, "seed is -1")


@given(size=st.integers(1, 30), seed=st.integers(0, 99), visits=st.integers(0, 70), shuffle=st.booleans())
def test_seeking_is_the_same_as_visiting(size: int, seed: int, visits: int, shuffle: bool) -> None:
    walked, sought = (TaskSampler(size, seed=seed, shuffle=shuffle) for _ in range(2))
    for _ in range(visits):
        walked.next()
    sought.seek(visits)
    assert sought.next() == walked.next()


STAGES = ("basic_math", "advanced_math", "competition_math")


class ByStage(Curriculum):
    """Epochs 0 and 1 are basic, 2 and 3 advanced, then come the competition's tasks and the basic ones again."""

    def choose(self, epoch: int) -> list[int]:
        wanted = {STAGES[min(epoch // 2, 2)]} | ({STAGES[0]} if epoch > 3 else set())
        return [i for i, t in enumerate(self.tasks) if t.interaction is not None and t.interaction.name in wanted]


def staged(*counts: int) -> list[Task]:
    names = [name for name, count in zip(STAGES, counts, strict=True) for _ in range(count)]
    return [Task(id=str(i), prompt=(), interaction=InteractionRef(name=name, kwargs={})) for i, name in enumerate(names)]


def test_curriculum_changes_tasks_by_epoch() -> None:
    tasks = staged(3, 2, 4)
    sampler = ByStage(tasks, seed=5)
    visits = [sampler.next() for _ in range(sampler.visits(6))]
    mix = [{tasks[v.task].interaction.name for v in visits if v.epoch == epoch} for epoch in range(6)]  # type: ignore[union-attr]
    assert mix == [{STAGES[0]}] * 2 + [{STAGES[1]}] * 2 + [{STAGES[0], STAGES[2]}] * 2
    assert len(visits) == 3 + 3 + 2 + 2 + 7 + 7
    assert sorted(v.task for v in visits if v.epoch == 5) == [0, 1, 2, 5, 6, 7, 8]


@given(before=st.integers(0, 40), seed=st.integers(0, 20))
def test_curriculum_resumes_anywhere(before: int, seed: int) -> None:
    tasks = staged(3, 1, 4)
    whole, sought, loaded = (ByStage(tasks, seed=seed) for _ in range(3))
    for _ in range(before):
        whole.next()
    sought.seek(before)
    loaded.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    rest = [whole.next() for _ in range(20)]
    assert rest == [sought.next() for _ in range(20)] == [loaded.next() for _ in range(20)]


class Chooses(Curriculum):
    chosen: tuple[int, ...] = ()

    def choose(self, epoch: int) -> tuple[int, ...]:
        return self.chosen


def test_empty_epoch_and_unknown_task_are_refused() -> None:
    refuses(lambda: Chooses(staged(1, 1, 1), seed=0), DataError, "chose no task for epoch 0")
    beyond = type("Beyond", (Chooses,), {"chosen": (0, 3)})
    refuses(lambda: beyond(staged(1, 1, 1), seed=0), DataError, "chose task 3 for epoch 0; there are tasks 0 to 2")


def test_task_may_be_chosen_more_than_once() -> None:
    often = type("Often", (Chooses,), {"chosen": (1, 1, 2)})(staged(1, 1, 1), seed=0)
    assert sorted(often.next().task for _ in range(3)) == [1, 1, 2]


OWN = """
from polyturn.data.sampler import Curriculum

class Levels(Curriculum):
    def __init__(self, tasks, *, seed, shuffle=True, level=1):
        self.part = len(tasks) // level
        super().__init__(tasks, seed=seed, shuffle=shuffle)

    def choose(self, epoch):
        return range(self.part)
"""


def test_own_sampler_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    tasks = [Task(id=name, prompt=()) for name in "ab"]

    def make(**arguments: int) -> TaskSampler:
        data = DataConfig.model_validate({"sampler": {"name": "own.py:Levels", **arguments}})
        config = RunConfig.model_validate({"model": {"path": "x"}, "data": data})
        return build_sampler(ConfigSource(config=config, base=tmp_path), tasks)()

    assert make(level=2).visits(1) == 1
    refuses(lambda: make(levels=2), ConfigError, "'own.py:Levels'", "'levels'")
    refuses(lambda: make(level=0), ConfigError, "'own.py:Levels'", "ZeroDivisionError", "own.py, line 6")
