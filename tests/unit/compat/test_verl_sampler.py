"""Samplers in verl's form decide the order of a run's tasks, learn from its steps, and continue after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from torch.utils.data import RandomSampler, SequentialSampler

from polyturn import compat
from polyturn.compat.verl.sampler import SamplerOrder, create_rl_sampler
from polyturn.core.errors import CheckpointError, ConfigError, DataError
from polyturn.core.messages import Message
from polyturn.core.task import Task
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.testing.episodes import scripted_context
from support.refusals import refuses

FILE = """
from verl.experimental.dataset.sampler import AbstractCurriculumSampler, AbstractSampler


class Backwards(AbstractSampler):
    def __init__(self, data_source, data_config):
        self.rows, self.start = data_source, data_config.start

    def __iter__(self):
        return iter(range(len(self.rows) - 1, self.start - 1, -1))

    def __len__(self):
        return len(self.rows) - self.start


class Hardest(AbstractCurriculumSampler):
    def __init__(self, data_source, data_config):
        self.next_one = 0
        assert data_source[2]["raw_prompt"] == [{"role": "user", "content": "2?"}]

    def __iter__(self):
        while True:
            yield self.next_one

    def update(self, batch):
        assert list(batch.non_tensor_batch["index"]) == ["t0", "t0"]
        assert batch.batch["token_level_scores"].sum(-1).tolist() == [0.5, 0.5]
        self.next_one += 1

    def state_dict(self):
        return {"next": self.next_one}

    def load_state_dict(self, state):
        self.next_one = state["next"]


class Counts(Hardest):
    def __init__(self, data_source, data_config):
        self.next_one = 0

    def __iter__(self):
        while self.next_one < 4:
            self.next_one += 1
            yield self.next_one - 1


class Empty(Backwards):
    indices = ()

    def __iter__(self):
        return iter(self.indices)


class Elsewhere(Empty):
    indices = (7,)


class Named(Empty):
    indices = ("t0",)


class Listed(Backwards):
    def __iter__(self):
        return [0, 1]


class Unmade(AbstractCurriculumSampler):
    def __init__(self, data_source, data_config):
        pass

    def update(self, batch):
        raise KeyError("acc")


class NoSampler:
    pass
"""


def tasks(num: int = 4) -> list[Task]:
    return [Task(id=f"t{i}", prompt=(Message(role="user", content=f"{i}?"),), data_source="s") for i in range(num)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    compat.install("verl")
    (tmp_path / "own.py").write_text(FILE)
    return tmp_path / "own.py"


def maker(file: Path, name: str, **config: Any) -> Any:
    return SamplerOrder.maker(tasks(), seed=0, shuffle=True, sampler=f"{file}:{name}", config={"start": 1, **config})


def test_order_is_what_the_sampler_yields_and_resumes(file: Path) -> None:
    make = maker(file, "Backwards")
    first, again = make(), make()
    assert [tuple(first.next()) for _ in range(5)] == [(0, 3), (0, 2), (0, 1), (1, 3), (1, 2)]
    assert tuple(again.at(4)) == (1, 2) and again.visits(2) == 6
    state = first.state_dict()
    resumed = maker(file, "Backwards")()
    resumed.load_state_dict(state)
    assert [tuple(resumed.next()) for _ in range(2)] == [(1, 1), (2, 3)]
    refuses(lambda: resumed.load_state_dict({**state, "size": 9}), CheckpointError, "has size 9 and this run has 4")


def test_tasks_drawn_ahead_of_a_checkpoint_come_again(file: Path) -> None:
    make = maker(file, "Counts")
    assert [make().at(number).task for number in range(3)] == [0, 1, 2]
    order = make()
    order.seek(1)
    resumed = maker(file, "Counts")()
    resumed.load_state_dict(order.state_dict())
    assert [resumed.next().task for _ in range(3)] == [1, 2, 3]


async def test_sampler_learns_before_the_next_task_is_drawn(file: Path) -> None:
    order = maker(file, "Hardest")()
    assert order.next().task == 0
    context = scripted_context(["a", "b"], rewards={"s": lambda trajectory: 0.5})
    group = await RolloutPool(context).run_one(GroupSpec(id="g0", task=tasks()[0], size=2))
    order.observe([group])
    assert order.next().task == 1
    resumed = maker(file, "Hardest")()
    resumed.load_state_dict(order.state_dict())
    assert tuple(resumed.next()) == (0, 1)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Empty", "chose no task for epoch 0"),
        ("Elsewhere", "the sampler Elsewhere chose task 7; there are tasks 0 to 3"),
        ("Named", "chose task 't0'; there are tasks 0 to 3"),
        ("Listed", "the sampler Listed failed with TypeError"),
        ("Unmade", "the sampler Unmade failed with NotImplementedError"),
    ],
)
def test_impossible_orders_are_named(file: Path, name: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        maker(file, name)().next()


async def test_mistakes_of_a_sampler_are_named(file: Path) -> None:
    context = scripted_context(["a"], rewards={"s": lambda trajectory: 0.5})
    group = await RolloutPool(context).run_one(GroupSpec(id="g0", task=tasks()[0], size=1))
    refuses(lambda: maker(file, "Unmade")().observe([group]), DataError, "Unmade failed in update with KeyError: 'acc'")
    refuses(lambda: maker(file, "NoSampler"), ConfigError, "NoSampler'")
    refuses(
        lambda: SamplerOrder.maker(tasks(), seed=0, shuffle=True, sampler=f"{file}:Backwards", config={}),
        ConfigError,
        "Backwards",
    )


def test_section_names_the_sampler(file: Path) -> None:
    named = {"class_path": str(file), "class_name": "Backwards"}
    config = OmegaConf.create({"sampler": named, "dataloader_num_workers": 0, "start": 0})
    assert list(create_rl_sampler(config, tasks())) == [3, 2, 1, 0]
    refuses(
        lambda: create_rl_sampler(OmegaConf.create({"sampler": named, "start": 0}), tasks()), AssertionError, "it must be 0"
    )
    assert isinstance(create_rl_sampler(OmegaConf.create({"shuffle": True, "seed": 1}), tasks()), RandomSampler)
    assert isinstance(create_rl_sampler(OmegaConf.create({"shuffle": False}), tasks()), SequentialSampler)
