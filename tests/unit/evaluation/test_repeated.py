"""Evaluations that run each task N times: exact definitions, and the names that verl's dashboards read."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from polyturn.compat.verl.validation import validation_metrics
from polyturn.core.lifecycle import StopReason
from polyturn.core.reward import Reward
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.evaluation.repeated import flat, repeated_metrics, sizes, task_metrics


def group(*rewards: float | None, id: str = "t", source: str | None = "a/b", info: Any = None) -> TrajectoryGroup:
    task = Task(id=id, prompt=(), data_source=source)
    members = []
    for number, total in enumerate(rewards):
        told = {} if info is None else info[number]
        reward = None if total is None else Reward(total=total, info=told)
        stop = StopReason.STOP if reward else StopReason.ERROR
        members.append(Trajectory(id=f"{id}/{number}", task=task, segments=(), turns=(), stop_reason=stop, reward=reward))
    return TrajectoryGroup(id=id, task=task, trajectories=tuple(members))


@pytest.mark.parametrize(("num", "n"), [(1, [1]), (2, [2]), (3, [2, 3]), (4, [2, 4]), (5, [2, 4, 5]), (8, [2, 4, 8])])
def test_sizes_are_powers_of_two_and_all(num: int, n: list[int]) -> None:
    assert sizes(num) == n


def test_one_sample_has_a_mean_alone() -> None:
    assert task_metrics([0.25], num=1) == {"mean@1": 0.25}


def drawn_one_by_one(values: list[float], votes: list[str], n: int) -> dict[str, float]:
    """Compute the numbers by their definition: draw, choose, average."""
    rng = np.random.RandomState(42)
    best, worst, majority = [], [], []
    for _ in range(1000):
        chosen = [(values[i], votes[i]) for i in rng.choice(len(values), size=n, replace=True)]
        best.append(max(v for v, _ in chosen))
        worst.append(min(v for v, _ in chosen))
        won = Counter(vote for _, vote in chosen).most_common(1)[0][0]
        majority.append(next(v for v, vote in chosen if vote == won))
    found = {"best": best, "worst": worst, "maj": majority}
    return {f"{k}@{n}/{s}": f(v) for k, v in found.items() for s, f in (("mean", np.mean), ("std", np.std))}


def test_best_worst_and_vote_are_a_seeded_bootstrap() -> None:
    """Users compare these numbers between trainers, so the draws are pinned."""
    values, votes = [0.0, 1.0, 0.25, 1.0, 0.0], ["a", "b", "c", "b", "a"]
    expected = {"mean@5": 0.45, "std@5": float(np.std(values))}
    for n in (2, 4, 5):
        expected |= drawn_one_by_one(values, votes, n)
    assert task_metrics(values, num=5, votes=votes) == pytest.approx(expected)


def test_vote_needs_an_answer_of_each_sample() -> None:
    assert not any(name.startswith("maj") for name in task_metrics([0.0, 1.0], num=2, votes=["a", None]))


def test_tasks_are_averaged_by_data_source() -> None:
    table = repeated_metrics([group(0, 1), group(1, 1), group(0.5, 0, source="c"), group(0, 0, source=None)])
    assert {source: names["reward"]["mean@2"] for source, names in table.items()} == {"a/b": 0.75, "c": 0.25, "unknown": 0.0}
    assert flat(table)["a/b/reward/mean@2"] == 0.75


def test_failed_trajectory_counts_as_zero() -> None:
    table = repeated_metrics([group(1.0, None, 0.0), group(None, None, None)])
    assert table["a/b"]["reward"]["mean@3"] == 0.5
    assert set(table["a/b"]["reward"]) >= {"std@3", "best@2/mean", "best@3/mean"}


def test_numbers_from_reward_functions_are_metrics() -> None:
    info = [{"acc": True, "pred": "4", "note": "text"}, {"acc": False, "pred": "5", "length": 3}]
    names = repeated_metrics([group(1.0, -1.0, info=info)])["a/b"]
    assert set(names) == {"reward", "acc", "length"}
    assert names["acc"]["mean@2"] == 0.5
    assert "maj@2/mean" in names["acc"]


def test_metric_names_are_those_of_dashboards() -> None:
    """Users rely on these names."""
    found = validation_metrics([group(0, 1, 1, 1), group(0, 0, 0, 0)])
    core = {name for name in found if name.startswith("val-core/")}
    assert core == {f"val-core/a/b/reward/{m}" for m in ("mean@4", "best@4/mean", "best@4/std")}
    assert {"val-aux/a/b/reward/std@4", "val-aux/a/b/reward/worst@4/mean", "val-aux/a/b/reward/best@2/mean"} <= set(found)
    assert found["val-core/a/b/reward/mean@4"] == 0.375
    assert {"val-aux/num_turns/min", "val-aux/num_turns/max", "val-aux/num_turns/mean"} <= set(found)


def test_acc_is_the_core_metric_where_returned() -> None:
    info = [{"acc": 1.0, "pred": "4"}, {"acc": 0.0, "pred": "4"}]
    found = validation_metrics([group(1.0, -1.0, info=info)])
    core = {name for name in found if name.startswith("val-core/")}
    assert core == {f"val-core/a/b/acc/{m}" for m in ("mean@2", "best@2/mean", "best@2/std", "maj@2/mean", "maj@2/std")}
    assert "val-aux/a/b/reward/mean@2" in found
    assert validation_metrics([group(1.0)]) == {"val-core/a/b/reward/mean@1": 1.0} | {
        f"val-aux/num_turns/{m}": 1.0 for m in ("min", "max", "mean")
    }


def test_info_named_reward_does_not_replace_the_reward() -> None:
    assert repeated_metrics([group(1.0, info=[{"reward": 0.25}])])["a/b"]["reward"]["mean@1"] == 1.0
