"""Geo3kTool checks mathematical answers; repeating one costs."""

from __future__ import annotations

import pytest

from polyturn.tools.geo3k import Geo3kTool


async def test_progress_is_free_and_repeating_costs() -> None:
    pytest.importorskip("math_verify")
    tool = Geo3kTool({})
    assert tool.name == "calc_geo3k_reward"
    instance_id, _ = await tool.create("e", create_kwargs={"ground_truth": "1/2"})
    rewards = [(await tool.execute(instance_id, {"answer": answer}))[1] for answer in ("3", "0.5", "0.5")]
    assert rewards == [-0.05, 0.0, -0.05]
    assert await tool.calc_reward(instance_id) == 1.0
    await tool.release(instance_id)
    assert tool._instance_dict == {}
