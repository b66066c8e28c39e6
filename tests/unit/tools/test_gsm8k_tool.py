"""Gsm8kTool: the answer is scored, and an answer that is no progress costs 0.05."""

from __future__ import annotations

import pytest

from polyturn.tools.gsm8k import Gsm8kTool


async def test_progress_is_free_and_repeating_costs() -> None:
    tool = Gsm8kTool({})
    instance_id, response = await tool.create("e", ground_truth="72")
    assert (instance_id, response.is_empty()) == ("e", True)
    said, rewards = [], []
    for answer in ("70", "72", "72", 72, "#### 72", "1"):
        response, reward, metrics = await tool.execute(instance_id, {"answer": answer})
        said.append(response.text)
        rewards.append(reward)
        assert metrics == {}
    assert rewards == [-0.05, 0.0, -0.05, -0.05, -0.05, -0.05]
    assert said[1] == "Current parsed answer='72' reward=1.0"
    assert await tool.calc_reward(instance_id) == 0.0
    await tool.release(instance_id)
    assert tool._instance_dict == {}
    with pytest.raises(KeyError):
        await tool.release(instance_id)


async def test_the_right_answer_may_be_nested() -> None:
    tool = Gsm8kTool({})
    instance_id, _ = await tool.create(create_kwargs={"ground_truth": "5"})
    assert (await tool.execute(instance_id, {"answer": "5"}))[1] == 0.0
    assert await tool.calc_reward(instance_id) == 1.0


async def test_episodes_do_not_share_state() -> None:
    tool = Gsm8kTool({})
    for name in "ab":
        await tool.create(name, ground_truth=(name == "a" and "1") or "2")
    assert (await tool.execute("a", {"answer": "1"}))[1] == 0.0
    assert (await tool.execute("b", {"answer": "1"}))[1] == -0.05


async def test_no_answer_at_all_scores_zero() -> None:
    tool = Gsm8kTool({})
    await tool.create("e", ground_truth="1")
    assert (await tool.execute("e", {}))[1] == -0.05
    assert await tool.calc_reward("e") == 0.0
