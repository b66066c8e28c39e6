"""The tools that check an answer, of GSM8K and of geometry: progress is free, and an answer that is none costs 0.05."""

from __future__ import annotations

from typing import Any

import pytest

from polyturn.tools.geo3k import Geo3kTool
from polyturn.tools.gsm8k import Gsm8kTool


@pytest.mark.parametrize(
    ("tool", "truth", "answers", "rewards", "final"),
    [
        (Gsm8kTool, "72", ["70", "72", "72", 72, "#### 72", "1"], [-0.05, 0.0, -0.05, -0.05, -0.05, -0.05], 0.0),
        (Gsm8kTool, "72", ["72"], [0.0], 1.0),
        (Gsm8kTool, "72", [None], [-0.05], 0.0),
        (Geo3kTool, "1/2", ["3", "0.5", "0.5"], [-0.05, 0.0, -0.05], 1.0),
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
async def test_progress_is_free_and_repeating_costs(
    tool: Any, truth: str, answers: list[Any], rewards: list[float], final: float, is_nested: bool
) -> None:
    if tool is Geo3kTool:
        pytest.importorskip("math_verify")
    made, row = tool({}), {"ground_truth": truth}
    instance_id, response = await made.create("e", **({"create_kwargs": row} if is_nested else row))
    assert (instance_id, response.is_empty()) == ("e", True)
    asked = [{} if answer is None else {"answer": answer} for answer in answers]
    assert [(await made.execute("e", parameters))[1] for parameters in asked] == rewards
    assert await made.calc_reward("e") == final
    await made.release("e")
    with pytest.raises(KeyError):
        await made.release("e")


async def test_model_reads_how_its_answer_was_parsed() -> None:
    tool = Gsm8kTool({})
    await tool.create("e", ground_truth="72")
    assert (await tool.execute("e", {"answer": "#### 72"}))[0].text == "Current parsed answer='#### 72' reward=1.0"


async def test_episodes_do_not_share_state() -> None:
    tool = Gsm8kTool({})
    await tool.create("a", ground_truth="1")
    await tool.create("b", ground_truth="2")
    assert (await tool.execute("a", {"answer": "1"}))[1] == 0.0
    assert (await tool.execute("b", {"answer": "1"}))[1] == -0.05
