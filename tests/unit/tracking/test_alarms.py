"""Alarms: raised when a number stays past its threshold, once, until it has recovered."""

from __future__ import annotations

import math

import pytest

from polyturn.tracking.alarms import Alarms


def names(alarms: Alarms, metric: str, values: list[float | None]) -> list[tuple[int, str]]:
    """Feed one metric step by step; return (step, name) of each alarm."""
    return [(step, a.name) for step, value in enumerate(values) for a in alarms.feed(step, {metric: value})]


@pytest.mark.parametrize(
    ("metric", "early", "late", "name"),
    [
        ("policy/entropy", 1.0, 0.1, "entropy_collapse"),
        ("tokens/per_trajectory", 100.0, 10.0, "length_collapse"),
        ("tokens/per_trajectory", 100.0, 400.0, "length_explosion"),
        ("rollout/turns", 2.4, 1.0, "turns_collapse"),
        ("rollout/tool_errors", 0.05, 0.4, "tool_errors"),
        ("policy/entropy", 1.0, 0.3, None),
        ("policy/entropy", 0.0, 0.0, None),
        ("tokens/per_trajectory", 100.0, 250.0, None),
        ("rollout/turns", 1.0, 1.0, None),
        ("rollout/turns", 2.4, 1.4, None),
        ("rollout/tool_errors", 0.5, 0.6, None),
    ],
)
def test_alarm_is_raised_after_three_steps_past_its_threshold(
    metric: str, early: float, late: float, name: str | None
) -> None:
    assert names(Alarms(), metric, [early] * 8 + [late] * 10) == ([] if name is None else [(10, name)])


def test_equal_rewards_for_ten_steps_raise_one_alarm() -> None:
    silent: list[float | None] = [0.0] * 15
    assert names(Alarms(), "reward/std", silent) == [(9, "no_signal")]
    assert names(Alarms(), "reward/std", [*silent[:9], 0.2, *silent[:9]]) == []


def test_equal_rewards_are_reported_once_where_nothing_trained() -> None:
    idle = {"reward/std": 0.0, "loss/grad_norm": 0.0, "buffer/groups_zero_variance": 4.0}
    alarms = Alarms()
    assert [a.name for step in range(20) for a in alarms.feed(step, idle)] == ["nothing_trained"]


@pytest.mark.parametrize(("success", "word"), [(0.0, "warm_start"), (1.0, "harder"), (0.4, "train.group_size")])
def test_alarm_without_a_signal_says_what_to_change(success: float, word: str) -> None:
    alarms = Alarms()
    (alarm,) = [a for step in range(10) for a in alarms.feed(step, {"reward/std": 0.0, "rollout/success": success})]
    assert word in alarm.message


def test_alarm_comes_again_after_a_recovery_only() -> None:
    values: list[float | None] = [1.0] * 5 + [0.1] * 5 + [1.0] + [0.1] * 3
    assert [step for step, _ in names(Alarms(), "policy/entropy", values)] == [7, 13]


def test_short_dip_and_missing_numbers_raise_nothing() -> None:
    values: list[float | None] = [1.0] * 5 + [0.1, 0.1, 1.0, 0.1, None, math.nan, 0.1]
    assert names(Alarms(), "policy/entropy", values) == []


def test_one_odd_early_step_does_not_move_the_median() -> None:
    assert names(Alarms(), "policy/entropy", [1.0, 1.0, 90.0, 1.0, 1.0, 0.5, 0.5, 0.5]) == []


def test_alarm_names_step_metric_value_and_keys_to_change() -> None:
    alarms = Alarms()
    entropies = [*[1.0] * 5, *[0.0412] * 3]
    (alarm,) = [a for step, value in enumerate(entropies) for a in alarms.feed(step, {"policy/entropy": value})]
    for word in ("step 7", "policy/entropy is 0.0412", "20%", "train.optim.lr", "algorithm.entropy_coef"):
        assert word in alarm.message
