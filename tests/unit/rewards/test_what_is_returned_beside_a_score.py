"""What a reward function returns beside its score may be a policy's to choose: it is recorded, and ends no run."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from polyturn.core.trajectory import TrajectoryGroup
from polyturn.evaluation.repeated import repeated_metrics
from polyturn.evaluation.statistics import statistics
from polyturn.rewards.router import RewardRouter
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.store.parquet_store import ParquetStore
from polyturn.store.stored_run import open_store
from polyturn.testing.episodes import scripted_context, task
from polyturn.tracking.dump import TrajectoryDump
from polyturn.training.rollout_metrics import rollout_metrics


class Unwritable:
    def __repr__(self) -> str:
        raise ZeroDivisionError("no words for it")


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def circle() -> Any:
    value: list[Any] = []
    value.append({"again": value})
    return value


ODD: dict[str, Any] = {
    "a number too long to print": 10**5000,
    "not a number": float("nan"),
    "deep": deep(100_000),
    "half too deep": deep(300),
    "a circle": circle(),
    "unwritable": Unwritable(),
    "half a pair": "\ud800",
    "a set": {1, "a"},
}


@pytest.mark.parametrize("name", ODD)
def test_odd_value_beside_a_score_is_recorded(name: str, tmp_path: Path) -> None:
    def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
        return {"score": 1.0, "pred": ODD[name], "judge_tokens": ODD[name], "acc": 0.5}

    spec = GroupSpec(id="g0", task=task("2+2?", ground_truth="4"), size=2)
    (played,) = asyncio.run(RolloutPool(scripted_context(["It is 5."])).run([spec]))
    router = RewardRouter(function=score)
    rewarded = tuple(dataclasses.replace(t, reward=asyncio.run(router.score(t))) for t in played.trajectories)
    group: TrajectoryGroup = dataclasses.replace(played, trajectories=rewarded)
    for trajectory in group.trajectories:
        assert trajectory.reward.numbers["acc"] == 0.5
        assert all(abs(number) < 1e16 for number in trajectory.reward.numbers.values())
    assert rollout_metrics([group], version=0)
    assert statistics([group])["all"].success.mean == 1.0
    (table,) = repeated_metrics([group]).values()
    assert table["acc"]["mean@2"] == 0.5
    written = TrajectoryDump(tmp_path / "dump", lambda ids: "text").write(1, [group])
    assert [json.loads(line)["score"] for line in written.read_text().splitlines()] == [1.0, 1.0]
    with ParquetStore(tmp_path) as store:
        store.add(group, step=1, split="train")
    for trajectory in open_store(tmp_path).trajectories():
        assert trajectory.reward.info["acc"] == 0.5 and "pred" in trajectory.reward.info
