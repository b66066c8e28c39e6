"""The meaning of each number of an evaluation, on episodes with known outcomes."""

from __future__ import annotations

import math

from polyturn.core.trajectory import Trajectory
from polyturn.evaluation.report import is_success, report
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task
from support.parts import add, call


async def play(*says: str | Exception, max_turns: int = 4, interaction: bool = True) -> Trajectory:
    context = scripted_context(
        says, tools=[add], interactions={"gsm8k": Gsm8kInteraction({})}, limits=Limits(max_turns=max_turns)
    )
    return await run_episode(context, task(interaction="gsm8k" if interaction else None), id="e")


async def test_success_and_repair():
    at_once, repaired = await play("#### 4"), await play("#### 5", "#### 4")
    never = await play("#### 5", "#### 6", "#### 7", max_turns=3)
    found = report([at_once, repaired, never])
    assert (found.num_trajectories, found.success, found.first_turn_success) == (3, 2 / 3, 1 / 3)
    assert found.mean_turns == 2.0
    assert (found.num_repairable, found.repaired) == (2, 0.5)
    assert (found.cut, found.out_of_turns) == (0, 1 / 3) and found.failed == 0 and found.mean_reward == 2 / 3


async def test_tool_calls_without_errors_are_valid():
    found = report([await play(call("add", a=1, b=2), call("sub", a=1, b=2), "#### 4", interaction=False)])
    assert found.valid_tool_calls == 0.5
    assert found.success == 1 and found.first_turn_success == 0, "a success that took a tool call took more than a turn"


async def test_failed_trajectory_is_not_a_success():
    found = report([await play("#### 4"), await play(OSError("gone"))])
    assert (found.success, found.failed, found.mean_reward) == (0.5, 0.5, 1.0)


async def test_share_of_nothing_is_nan():
    found = report([await play("#### 4", interaction=False)])
    assert math.isnan(found.valid_tool_calls) and math.isnan(found.repaired) and found.num_repairable == 0
    assert found.to_metrics("eval/x")["eval/x/success"] == 1.0


async def test_success_threshold_is_an_option():
    one = await play("#### 5", max_turns=1)
    assert not is_success(one) and is_success(one, at=0.0)
    assert report([one], success_at=0.0).success == 1
