"""Distributions over steps: each value is counted once, in the column of its step, whatever the length of the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from polyturn.viewer.distributions import BINS, COLUMNS, TOKENS, distribution, reward_parts, spaced
from polyturn.viewer.run_view import RunView
from support.viewer_runs import write_run


def test_every_finite_value_falls_into_one_bin():
    rng = np.random.default_rng(0)
    step, value = np.repeat(np.arange(1, 601), 16), rng.normal(size=600 * 16)
    value[::100] = np.nan
    found = distribution(step, value)
    counts = np.array(found["counts"])
    assert counts.shape == (COLUMNS, BINS) and counts.sum() == np.isfinite(value).sum()
    assert found["steps"] == list(range(1, 601, 10))
    first = value[:160]
    assert found["mean"][0] == pytest.approx(np.nanmean(first)) and counts[0].sum() == np.isfinite(first).sum()
    assert distribution(step, np.full(len(step), np.nan)) is None
    same = distribution(step[:16], np.ones(16))
    assert np.sum(same["counts"]) == 16


def test_long_list_gives_evenly_spaced_numbers():
    lists = pa.array([[1.0, 2.0], None, [float(i) for i in range(10 * TOKENS)], []], pa.list_(pa.float32()))
    row, length, value = spaced(lists)
    assert length.tolist() == [2, 0, 10 * TOKENS, 0]
    assert value[row == 0].tolist() == [1, 2] and value[row == 2].tolist() == [10.0 * i for i in range(TOKENS)]


def test_parts_of_the_reward_are_means_of_a_step():
    parts = pa.array([[("a", 1.0), ("b", 2.0)], [("a", 3.0)], None, [("b", 5.0)]], pa.map_(pa.string(), pa.float64()))
    table = pa.table({"step": [1, 1, 1, 2], "reward": [3.0, 6.0, None, 0.0], "components": parts})
    means = {"a": [pytest.approx(4 / 3), 0], "b": [pytest.approx(2 / 3), 5]}
    assert reward_parts(table, {"a": 1.0}) == {"steps": [1, 2], "parts": means, "is_sum": False}, "3 is not 1"
    by_weight = {"steps": [1, 2], "parts": {"a": [pytest.approx(3), 0]}, "is_sum": True}
    rewards = table.set_column(1, "reward", pa.array([2.25, 6.75, None, 0.0]))
    assert reward_parts(rewards, {"a": 2.25, "b": 0.0}) == by_weight, "what weighs nothing is left out"
    assert reward_parts(table.slice(3), {}) == {"steps": [2], "parts": {"b": [5]}, "is_sum": False}


def test_run_has_distributions_of_trajectories_and_tokens(tmp_path: Path):
    write_run(tmp_path / "first")
    found = {one["name"]: one for one in RunView(tmp_path / "first").distributions("train")["distributions"]}
    assert found["reward"]["steps"] == [1, 2, 3] and np.sum(found["num_turns"]["counts"], 1).tolist() == [6, 6, 6]
    evaluated = {one["name"] for one in RunView(tmp_path / "first").distributions("eval/hostile")["distributions"]}
    assert "num_turns" in evaluated and "staleness" not in evaluated, "an evaluation updates nothing"
    assert found["advantages"]["low"] == pytest.approx(-1, abs=0.05) and found["difference"]["steps"] == [1, 2, 3]
