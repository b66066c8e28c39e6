"""Tasks of several sources by weight: shares, passes, weights that change, and going on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from polyturn.core.errors import CheckpointError, ConfigError
from polyturn.data.mix import MixState, TaskMix
from polyturn.data.options import MixOptions
from polyturn.data.sampler import TaskSampler, Visit
from polyturn.testing.episodes import task
from support.refusals import refuses

TASKS = [
    task(id=f"{source}{i}", data_source=source) for source, size in (("a", 10), ("b", 4), ("c", 6)) for i in range(size)
]


def mix(weights: Mapping[str, Sequence[tuple[int, float]] | float], **options: Any) -> TaskMix:
    points = {k: [(0, v)] if isinstance(v, int | float) else v for k, v in weights.items()}
    settings = MixOptions(weights=points, by_success=options.pop("by_success", 0.0))
    return TaskMix(TASKS, settings, **{"per_step": 8, "seed": 0, **options})


def steps_of(sampler: TaskMix, count: int) -> list[list[str]]:
    return [[TASKS[sampler.next().task].id for _ in range(8)] for _ in range(count)]


def sources(step: Sequence[str]) -> Counter[str]:
    return Counter(name[0] for name in step)


def test_every_step_has_its_share_of_each_source():
    steps = steps_of(mix({"a": 3, "b": 1, "c": 0}), 4)
    assert [sources(step) for step in steps] == [Counter(a=6, b=2)] * 4
    total: Counter[str] = Counter()
    for step in steps_of(mix({"a": 1, "b": 1, "c": 1}), 30):
        found = sources(step)
        assert all(2 <= found[name] <= 4 for name in "abc")
        total += found
    assert all(79 <= total[name] <= 81 for name in "abc")


def test_each_source_is_visited_in_passes():
    visits = [name for step in steps_of(mix({"a": 1, "b": 1, "c": 0}), 5) for name in step if name[0] == "a"]
    assert sorted(visits[:10]) == sorted(visits[10:20]) == [f"a{i}" for i in range(10)] and visits[:10] != visits[10:]


def test_weights_change_with_the_step_along_straight_lines():
    steps = steps_of(mix({"a": 1, "b": [(0, 0.0), (4, 1.0)], "c": 0}), 12)
    shares = [sources(step)["b"] for step in steps]
    assert shares[0] == 0 and 1 <= shares[2] <= 4 and sum(shares[4:12]) in range(31, 34)


def test_sources_with_half_success_are_preferred():
    sampler = mix({"a": 1, "b": 1, "c": 1}, by_success=1.0)
    for _ in range(50):
        sampler.learn({"a": 0.5, "b": 0.98, "c": 0.0})
    shares = sampler.shares(0)
    assert shares["a"] > 0.8 and shares["b"] == pytest.approx(shares["c"])
    assert sources(steps_of(sampler, 1)[0])["a"] >= 6


def test_drawn_tasks_stay_when_success_changes():
    state = MixState()
    whole = steps_of(mix({"a": 1, "b": 1, "c": 1}, by_success=2.0, state=state), 6)
    later = mix({"a": 1, "b": 1, "c": 1}, by_success=2.0, state=state)
    later.learn({"a": 0.0, "b": 0.5, "c": 1.0})
    assert [TASKS[later.at(n).task].id for n in (17, 3, 46)] == [whole[2][1], whole[0][3], whole[5][6]]


def test_mix_resumes_from_a_checkpoint():
    first = mix({"a": 1, "b": 1, "c": 1}, by_success=2.0)
    first.learn({"a": 0.5, "b": 0.01, "c": 0.99})
    steps_of(first, 3)
    second = mix({"a": 1, "b": 1, "c": 1}, by_success=2.0)
    second.load_state_dict(first.state_dict())
    assert steps_of(second, 4) == steps_of(first, 4)
    with pytest.raises(CheckpointError, match="mix of tasks has seed 0, but this run has 1"):
        mix({"a": 1, "b": 1, "c": 1}, seed=1).load_state_dict(first.state_dict())


def test_checkpoint_of_another_sampler_is_refused():
    mixed, plain = mix({"a": 1, "b": 1, "c": 1}), TaskSampler(len(TASKS), seed=0)
    refuses(lambda: plain.load_state_dict(mixed.state_dict()), CheckpointError, "data.sampler")
    refuses(lambda: mixed.load_state_dict(plain.state_dict()), CheckpointError, "data.sampler")


def test_substitute_task_is_of_the_same_source():
    sampler = mix({"a": 1, "b": 1, "c": 1})
    for number in range(16):
        visit = sampler.at(number)
        assert TASKS[sampler.instead(visit, number=number, attempt=0)].data_source == TASKS[visit.task].data_source


def test_replacement_is_drawn_without_a_search_of_the_tasks():
    class Compared(int):
        """A task's index that counts how often it is compared."""

        count = 0

        def __eq__(self, other: object) -> bool:
            Compared.count += 1
            return int(self) == other

        __hash__ = int.__hash__

    sampler = mix({"a": 1, "b": 1, "c": 1})
    visit = Visit(0, Compared(len(TASKS) - 1))
    assert TASKS[sampler.instead(visit, number=0, attempt=0)].data_source == TASKS[-1].data_source
    assert Compared.count == 0


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"a": 1, "b": 1, "c": 1, "cc": 1}, r"weight for 'cc', which no task has as its data_source. Did you mean 'c'"),
        ({"a": 1, "b": 1}, "no weight for the data_source 'c' with 6 tasks; 0 leaves them out"),
    ],
)
def test_weights_without_their_source_are_refused(weights: dict[str, float], says: str):
    refuses(lambda: mix(weights), ConfigError, says)


def test_mix_has_no_epochs_and_needs_a_weight():
    refuses(lambda: mix({"a": 1, "b": 1, "c": 1}).visits(1), ConfigError, "set train.steps")
    refuses(lambda: mix({"a": 0, "b": [(0, 0.0), (1, 1.0)], "c": 0}).next(), ConfigError, "weights of 0 at step 0")
