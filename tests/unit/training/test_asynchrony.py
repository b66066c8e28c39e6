"""The loop with several versions at once, on a simulated engine and a virtual clock."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from polyturn.evaluation.options import EvalOptions
from polyturn.training.options import TrainOptions
from polyturn.training.state import LoopSettings
from support.asynchrony import run_simulated

MODES = ["in_flight", "wait", "abort_resume"]


def loop(**settings: Any) -> LoopSettings:
    values = {"steps": 8, "groups_per_step": 4, "group_size": 4, "checkpoint_every": 0, **settings}
    return LoopSettings(train=TrainOptions(**values), evaluation=EvalOptions(before=False))


@pytest.mark.parametrize("update", MODES)
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_staleness_reaches_and_keeps_its_bound(max_staleness: int, update: Any):
    run = run_simulated(loop(max_staleness=max_staleness), seed=1, update=update)
    assert set(run.staleness) == set(range(max_staleness + 1))
    assert (run.mixed > 0) == (update != "wait"), "completions cross an update, unless the update waits for them"


def test_rollout_beside_training_takes_less_time():
    waits, overlaps = (run_simulated(loop(max_staleness=k), seed=2, train_s=1.5).duration_s for k in (0, 1))
    assert overlaps < 0.75 * waits


def test_oversampling_drops_long_groups_and_counts_them():
    plain = run_simulated(loop(), seed=3, train_s=0.01)
    cut = run_simulated(loop(oversample=0.75), seed=3, train_s=0.01)
    assert cut.duration_s < plain.duration_s
    total: Counter[str] = Counter()
    for metrics in cut.metrics:
        total.update(metrics)
    assert total["buffer/groups_left_over"] >= 3 * 7 and total["tokens/dropped_left_over"] > 0
    by_length = [total[f"buffer/dropped_decile_{i}"] for i in range(10)]
    assert sum(by_length) >= 4 * total["buffer/groups_left_over"]
    mean = [sum(run.lengths) / len(run.lengths) for run in (plain, cut)]
    assert mean[1] < mean[0], "the bias is real"


@pytest.mark.parametrize(("share", "num", "extra"), [(1.1, 50, 55), (0.07, 100, 7), (0.5, 3, 2), (0.001, 4, 1), (0, 4, 0)])
def test_shares_of_groups_are_rounded_up_exactly(share: float, num: int, extra: int):
    options = TrainOptions(groups_per_step=num, oversample=share, replay=share, max_staleness=2)
    assert (options.extra_groups, options.replayed_groups) == (extra, extra)


def test_oversampling_with_carry_drops_nothing():
    run = run_simulated(loop(max_staleness=1, oversample=0.75, leftover="carry", steps=16), seed=3)
    assert sorted(t for step in run.tasks for t in step) == sorted(f"t{i}" for i in range(64)), "each task once an epoch"
    assert max(run.staleness) == 1
    assert not any("buffer/groups_left_over" in metrics for metrics in run.metrics)


@pytest.mark.parametrize(
    "settings", [{}, {"max_staleness": 1}, {"max_staleness": 1, "oversample": 0.5, "leftover": "carry"}]
)
def test_resumed_run_trains_each_task_once(tmp_path: Path, settings: dict[str, Any]):
    first = run_simulated(loop(steps=7, checkpoint_every=7, **settings), seed=5, folder=tmp_path)
    second = run_simulated(loop(steps=16, **settings), seed=5, folder=tmp_path, resume=True)
    trained = [t for step in (*first.tasks, *second.tasks) for t in step]
    assert sorted(trained) == sorted(f"t{i}" for i in range(64))


def test_dynamic_sampling_replaces_groups_without_signal():
    plain = run_simulated(loop(), seed=4, flat_share=0.5)
    again = run_simulated(loop(dynamic_sampling=4), seed=4, flat_share=0.5)
    flat = [sum(m["buffer/groups_zero_variance"] for m in run.metrics) for run in (plain, again)]
    assert flat[0] > 8 > 4 > flat[1]
    assert sum(m.get("buffer/groups_resampled", 0) for m in again.metrics) >= flat[0]
    never = run_simulated(loop(steps=2, dynamic_sampling=3), seed=4, flat_share=1.0)
    assert [m["buffer/groups_resampled"] for m in never.metrics] == [12, 12], "three more tasks for each of four places"


def test_replacement_tasks_do_not_depend_on_timing():
    runs = [run_simulated(loop(dynamic_sampling=2), seed=seed, flat_share=0.5) for seed in (6, 7)]
    assert runs[0].tasks == runs[1].tasks


def test_replayed_groups_keep_the_staleness_bound():
    run = run_simulated(loop(max_staleness=3, replay=0.5), seed=8)
    assert max(run.staleness) <= 3
    assert sum(m["buffer/groups_replayed"] for m in run.metrics) >= 3
    assert [len(step) for step in run.tasks] == [4] * 8, "they are not recorded again"
