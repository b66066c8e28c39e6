"""Answers of environments, in the forms of gym and of games with several players."""

from __future__ import annotations

import pytest

from polyturn.rollout.env import EnvStep, Seated


@pytest.mark.parametrize("is_seated", [False, True])
@pytest.mark.parametrize(("terminated", "truncated"), [(False, False), (True, False), (False, True), (True, True)])
def test_limit_and_goal_both_end_an_episode(is_seated: bool, terminated: bool, truncated: bool):
    ended = {"terminated": terminated, "truncated": truncated}
    answer = Seated(seat=1, observation="", **ended) if is_seated else ("", 0.0, terminated, truncated, {})
    step = EnvStep.of(answer, name="game")
    assert (step.is_done, step.is_truncated) == (terminated or truncated, truncated and not terminated)
