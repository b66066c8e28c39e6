"""What the records of a step show."""

from __future__ import annotations

from polyturn.core.metrics import reduce
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.rollout.episode import run_episode
from polyturn.testing.episodes import scripted_context, task
from polyturn.tools.gsm8k import Gsm8kTool
from polyturn.training.rollout_metrics import rollout_metrics

SAYS = [
    '<tool_call>{"name": "calc_gsm8k_reward", "arguments": {"answer": "4"}}</tool_call>',
    '<tool_call>{"name": "made_up", "arguments": {}}</tool_call>',
    "<tool_call>no JSON</tool_call>",
    "#### 4",
]


async def test_calls_are_counted_by_tool_and_those_of_no_tool_as_unknown() -> None:
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
