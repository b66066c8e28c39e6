"""Baselines of agents: a running mean for each game and role, and peers that did the same work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polyturn.algorithms.advantages import GroupView, advantages
from polyturn.algorithms.advantages.base import MemberView
from polyturn.core.sample import TrainSample
from support.samples import sample_of


def sample(name: str) -> TrainSample:
    weights = np.array([0, 1, 1], np.float32)
    return sample_of(("g", name, 0), [1, 2, 3], weights, turn_ids=[-1, 0, 0])


def view(source: str, agent: str | None, *rewards: float) -> GroupView:
    members = tuple(MemberView(id=str(i), reward=r, samples=(sample(str(i)),)) for i, r in enumerate(rewards))
    return GroupView(id=f"g/{agent}", group="g", members=members, data_source=source, agent=agent)


def credit(state: dict[str, Any], *batch: GroupView, decay: float = 0.5) -> list[list[float]]:
    found = advantages.resolve("rae")(batch, state=state, decay=decay)
    return [[float(member[0][-1]) for member in group] for group in found.advantages]


def test_rewards_are_compared_with_their_own_game_and_role():
    state: dict[str, Any] = {}
    step = (view("chess", "white", 1.0), view("chess", "black", -1.0), view("go", "white", 3.0))
    assert credit(state, *step) == [[1.0], [-1.0], [3.0]]
    assert credit(state, *step) == [[0.5], [-0.5], [1.5]]
    assert credit(state, *step) == [[0.25], [-0.25], [0.75]]


def test_mean_of_equal_rewards_moves_as_one_by_one():
    together, apart = dict[str, Any](), dict[str, Any]()
    credit(together, view("go", None, 2.0, 2.0, 2.0))
    for _ in range(3):
        credit(apart, view("go", None, 2.0))
    assert together == pytest.approx(apart)


def test_order_within_a_step_changes_nothing():
    one, other = dict[str, Any](), dict[str, Any]()
    first, second = view("go", None, 1.0, 0.1), view("go", None, 0.7)
    assert credit(one, first, second) == credit(other, second, first)[::-1]
    assert one == other


def test_solvers_are_compared_on_the_problem_of_their_trajectory():
    """Two proposals; the first is solved by one of two solvers, the second by both."""
    batch = [
        view("", "proposer", 0.5, 0.0),
        view("", "solver 1", 1.0, 1.0),
        view("", "solver 2", 0.0, 1.0),
    ]
    assert peers(batch) == [[0.25, -0.25], [0.5, 0.0], [-0.5, 0.0]]
    assert peers(batch, within=["proposer"]) == [[0.0, 0.0], [0.0, 0.0], [-0.5, 0.5]]


def test_agent_without_peers_gets_no_advantage():
    assert peers([view("", "solver 1", 1.0), view("", "proposer", 3.0)]) == [[0.0], [0.0]]


def test_one_agent_is_centred_over_its_group(caplog: pytest.LogCaptureFixture):
    assert peers([view("", None, 1.0, 0.0)]) == [[0.5, -0.5]]
    assert "none with a reward of its own" in caplog.text


def test_pattern_without_an_agent_is_logged(caplog: pytest.LogCaptureFixture):
    peers([view("", "solver 1", 1.0, 0.0)], within=["sover*"])
    assert "sover*" in caplog.text and "solver 1" in caplog.text


def peers(batch: list[GroupView], **options: Any) -> list[list[float]]:
    found = advantages.resolve("hierarchical_grpo")(batch, **options)
    return [[float(member[0][-1]) for member in group] for group in found.advantages]
