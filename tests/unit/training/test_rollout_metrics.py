"""Metrics that are computed from the records of a step, the times of tools and interactions among them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polyturn.core.lifecycle import StopReason
from polyturn.core.metrics import reduce
from polyturn.core.task import InteractionRef
from polyturn.core.trajectory import ToolResult, Trajectory, TrajectoryGroup
from polyturn.rollout.episode import Episode
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler, Reply
from polyturn.testing.episodes import scripted_context, task, turn_ids
from polyturn.tools.gsm8k import Gsm8kTool
from polyturn.training.rollout_metrics import plugin_times, rollout_metrics, state_metrics

SAYS = [
    '<tool_call>{"name": "calc_gsm8k_reward", "arguments": {"answer": "4"}}</tool_call>',
    '<tool_call>{"name": "made_up", "arguments": {}}</tool_call>',
    "<tool_call>no JSON</tool_call>",
    "#### 4",
]


async def test_calls_are_counted_by_tool() -> None:
    one = task(ground_truth="4")
    trajectory = await run_episode(scripted_context(SAYS, tools=[Gsm8kTool({})]), one, id="g0/0")
    group = TrajectoryGroup(id="g0", task=one, trajectories=(trajectory,))
    metrics = reduce(rollout_metrics([group], version=0))
    calls = {name: value for name, value in metrics.items() if name.endswith(("/calls", "/errors"))}
    assert calls == {
        "tool/calc_gsm8k_reward/calls": 1,
        "tool/calc_gsm8k_reward/errors": 0,
        "tool/unknown/calls": 2,
        "tool/unknown/errors": 1,
    }
    assert metrics["rollout/turns"] == 4
    assert metrics["rollout/tool_errors"] == 2 / 3


def test_state_metrics_are_mean_numbers_of_episodes() -> None:
    def member(**metrics: float) -> Trajectory:
        return Trajectory(id="g0/0", task=task(), segments=(), turns=(), stop_reason=StopReason.STOP, metrics=metrics)

    members = tuple(member(generate_s=6.0, tools_s=1.0) for _ in range(3))
    greedy = member(generate_s=2.0, interaction_s=1.0)
    group = TrajectoryGroup(id="g0", task=task(), trajectories=members, baseline=greedy)
    assert state_metrics([group], step_s=4.0) == {
        "rollout/state_generating": 5.0,
        "rollout/state_tool": 0.75,
        "rollout/state_interaction": 0.25,
    }


async def test_spread_of_rewards_is_that_within_groups() -> None:
    async def member(name: str, reward: float) -> Trajectory:
        context = scripted_context(["a"], rewards={"*": lambda trajectory: reward})
        return await run_episode(context, task(), id=name)

    rewards = [[1.0, 1.0], [0.0, 1.0], [5.0]]
    groups = [
        TrajectoryGroup(
            id=f"g{i}", task=task(), trajectories=tuple([await member(f"g{i}/{j}", r) for j, r in enumerate(of_group)])
        )
        for i, of_group in enumerate(rewards)
    ]
    assert reduce(rollout_metrics(groups, version=0))["reward/std"] == pytest.approx((0.0 + 0.5**0.5) / 2)


async def test_numbers_of_a_reward_function_are_metrics() -> None:
    def score(trajectory: Trajectory) -> dict[str, Any]:
        return {"score": 1.0, "short": float(trajectory.id == "g0/0"), "std": 7.0, "why": "it is right"}

    context = scripted_context(["a"], rewards={"*": score})
    members = tuple([await run_episode(context, task(), id=f"g0/{i}") for i in range(2)])
    metrics = reduce(rollout_metrics([TrajectoryGroup(id="g0", task=task(), trajectories=members)], version=0))
    assert metrics["reward/short"] == 0.5
    assert (metrics["reward/std"], metrics["reward/own_std"]) == (0.0, 7.0)
    assert "reward/why" not in metrics


class Restless(MultiTurnScheduler):
    """Goes on in a message that it cut, masks a turn, and branches."""

    async def step(self, episode: Episode, turn: Any) -> Any:
        if turn.index == 0:
            return episode.go_on(" wait,", keep=2)
        if turn.index == 1:
            episode.weigh(turn, 0.0)
            for text in ("left", "right"):
                fork = episode.fork()
                fork.record(turn, Reply.of(text))
                await fork.prepare()
                await fork.generate()
        return None


async def test_untrained_tokens_are_counted_by_reason() -> None:
    one = task()
    context = scripted_context(["one two three four"], scheduler=Restless())
    trajectory = await run_episode(context, one, id="g0/0")
    found = reduce(rollout_metrics([TrajectoryGroup(id="g0", task=one, trajectories=(trajectory,))], version=0))
    size = len(turn_ids("one two three four"))
    assert len(trajectory.turns) == 4 and found["rollout/segments"] == 2 and found["rollout/segmented"] == 1
    assert found["rollout/forks"] == 2
    assert found["tokens/dropped_cut"] == size - 2
    assert found["tokens/dropped_masked"] == size
    assert found["tokens/replayed"] == 2 + size, "the second branch sees what was kept of turn 0, and turn 1"
    trained = sum(int((s.loss_weights > 0).sum()) for s in trajectory.segments)
    counted = trained + found["tokens/dropped_cut"] + found["tokens/dropped_masked"]
    assert counted == 4 * size == trajectory.metrics["sampled_tokens"]


async def episode(tool_s: list[float], *, error: str | None = None, interaction_s: float | None = None) -> Trajectory:
    ref = None if interaction_s is None else InteractionRef(name="user", kwargs={})
    t = await run_episode(scripted_context(["#### 4"]), task(), id="e")
    results = tuple(ToolResult(call_id="c", name="search", content="x", error=error, duration_s=s) for s in tool_s)
    timings = {"generate": 6.0, "tools": max(tool_s, default=0.0)}
    timings |= {} if interaction_s is None else {"interaction": interaction_s}
    turn = replace(t.turns[0], tool_results=results, timings=timings)
    return replace(t, turns=(turn,), task=replace(t.task, interaction=ref))


async def test_tool_has_its_median_slow_calls_and_share():
    found = reduce(plugin_times([await episode([1.0]), await episode([2.0]), await episode([3.0])]))
    assert found["time/tool/search/p50_s"] == 2.0
    assert found["time/tool/search/p99_s"] == pytest.approx(2.98)
    assert found["time/tool/search/share"] == pytest.approx(6 / 24)


async def test_interaction_has_its_times():
    found = reduce(plugin_times([await episode([], interaction_s=2.0)]))
    assert found == {
        "time/interaction/user/p50_s": 2.0,
        "time/interaction/user/p99_s": 2.0,
        "time/interaction/user/share": pytest.approx(0.25),
    }


async def test_unknown_tool_makes_no_metric():
    assert plugin_times([await episode([1.0], error="unknown_tool")]) == {}
    assert plugin_times([]) == {}
