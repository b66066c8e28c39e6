"""Why a trajectory has its advantage: the formula gives the result of the estimator, and names unknown values."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from polyturn.algorithms.advantages import assign_advantages, bind_estimator, dr_grpo, grpo, maxrl, opo, rloo
from polyturn.batching.samples import to_samples
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.store.schema import StoredTrajectory, Trained
from polyturn.testing.episodes import scripted_context, task
from polyturn.viewer.why_advantage import why_advantage


def group_of(rewards: list[float]) -> TrajectoryGroup:
    left = iter(rewards)
    context = scripted_context(["#### 4", "four, I think"], rewards={"x": lambda trajectory: next(left)})
    spec = GroupSpec(id="g0", task=task("What is 2+2?", id="t0", data_source="x"), size=len(rewards))
    return asyncio.run(RolloutPool(context).run([spec]))[0]


def recorded(group: TrajectoryGroup, estimator: Any) -> list[StoredTrajectory]:
    """Return the members with the advantages that training would record."""
    samples = assign_advantages([group], to_samples(group, temperature=1.0), estimator=estimator)
    rows = []
    for one in group.trajectories:
        parts = [s.advantages[s.loss_weights > 0] for s in samples if s.id.trajectory == one.id and s.advantages is not None]
        trained = Trained(advantages=np.concatenate(parts))
        rows.append(StoredTrajectory(trajectory=one, group="g0", step=3, split="train", trained=trained))
    return rows


@pytest.mark.parametrize(
    ("name", "estimator", "options"),
    [
        ("grpo", grpo, {}),
        ("grpo", grpo, {"norm_by_std": False}),
        ("grpo", grpo, {"eps": 0.5}),
        ("dr_grpo", dr_grpo, {}),
        ("rloo", rloo, {}),
        ("opo", opo, {}),
        ("maxrl", maxrl, {"eps": 0.1}),
    ],
)
def test_formula_gives_the_advantage_of_the_estimator(name: str, estimator: Any, options: Mapping[str, Any]):
    rows = recorded(group_of([1.0, 0.0, 0.25, 1.0]), bind_estimator(estimator, offered={}, kwargs=options))
    for row in rows:
        said = why_advantage(row, rows, {"algorithm": {"advantage": {"name": name, **options}}})
        older = why_advantage(row, rows, {"algorithm": {"advantage": name, "advantage_kwargs": dict(options)}})
        assert older == said
        assert said["value"] == pytest.approx(said["advantage"], rel=1e-4) and said["note"] == ""
        assert said["numbers"] and said["formula"].startswith("A = ") and len(said["members"]) == 4


@pytest.mark.parametrize("name", ["grpo", "maxrl"])
def test_formula_without_eps_has_no_value_for_equal_rewards(name: str):
    rows = recorded(group_of([0.0, 0.0]), grpo)
    answer = why_advantage(rows[0], rows, {"algorithm": {"advantage": {"name": name, "eps": 0}}})
    assert answer["value"] is None and answer["numbers"].endswith("/ (0 + 0)")


def test_advantage_of_another_formula_is_noted():
    rows = recorded(group_of([1.0, 0.0]), rloo)
    assert (
        "computed from more than these rewards" in why_advantage(rows[0], rows, {"algorithm": {"advantage": "grpo"}})["note"]
    )


@pytest.mark.parametrize("config", [{}, {"algorithm": "grpo"}, {"algorithm": {"advantage": ["a"], "advantage_kwargs": 3}}])
def test_recorded_advantage_is_shown_without_a_config(config: dict[str, Any]):
    rows = recorded(group_of([1.0, 0.0]), grpo)
    said = why_advantage(rows[0], rows, config)
    assert said["advantage"] == pytest.approx(0.707, abs=1e-3) and said["mean"] == 0.5 and said["value"] is None


def test_evaluation_is_noted_and_no_plugin_is_loaded():
    rows = recorded(group_of([1.0, 0.0]), grpo)
    evaluated = StoredTrajectory(trajectory=rows[0].trajectory, group="g0", step=3, split="eval/greedy")
    said = why_advantage(evaluated, [evaluated], {"algorithm": {"advantage": "evil.py:estimator"}})
    assert "Evaluations" in said["note"] and said["formula"] == "a custom estimator"


def test_trajectory_that_needs_no_reward_is_not_called_failed():
    row = recorded(group_of([1.0, 0.0]), grpo)[0]
    unscored = dataclasses.replace(row, trajectory=dataclasses.replace(row.trajectory, reward=None))
    answer = why_advantage(unscored, [unscored], {"algorithm": {"advantage": "grpo"}})
    assert "no reward" in answer["note"] and "failed" not in answer["note"] and answer["mean"] is None
