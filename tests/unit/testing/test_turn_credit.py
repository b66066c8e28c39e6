"""Estimators of turns need at most half the episodes of an outcome estimator where each turn has its own reward."""

import functools

import pytest

from support.turn_credit import TURN_LEVEL, Game, Learner, best_median

pytestmark = pytest.mark.learns


@functools.cache
def episodes(name: str) -> float:
    return best_median(Game(), name, TURN_LEVEL.get(name, {}), lrs=(2.0, 4.0, 8.0), seeds=range(3))


@pytest.mark.parametrize("name", TURN_LEVEL)
def test_credit_per_turn_needs_at_most_half_the_episodes(name: str) -> None:
    assert episodes(name) <= 0.5 * episodes("grpo")


def test_game_can_be_learned_from_outcomes_alone() -> None:
    game = Game(max_steps=100)
    assert episodes("grpo") < game.max_steps * 8
    assert Learner(game=game, name="grpo", lr=0.0).episodes_needed() == 800
