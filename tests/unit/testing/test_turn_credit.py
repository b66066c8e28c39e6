"""Estimators of turns need at most half the episodes of an outcome estimator where each turn has its own reward."""

import functools

import pytest

from support.benchmark import load_benchmark

pytestmark = pytest.mark.learns

credit = load_benchmark("turn_credit")


@functools.cache
def episodes(name: str) -> float:
    return credit.best_median(credit.Game(), name, credit.TURN_LEVEL.get(name, {}), lrs=(2.0, 4.0, 8.0), seeds=range(3))


@pytest.mark.parametrize("name", credit.TURN_LEVEL)
def test_credit_per_turn_needs_at_most_half_the_episodes(name: str) -> None:
    assert episodes(name) <= 0.5 * episodes("grpo")


def test_game_can_be_learned_from_outcomes_alone() -> None:
    game = credit.Game(max_steps=100)
    assert episodes("grpo") < game.max_steps * 8
    assert credit.Learner(game=game, name="grpo", lr=0.0).episodes_needed() == 800
