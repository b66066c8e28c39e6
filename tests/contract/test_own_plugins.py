"""The plug-ins that are shipped keep the contracts that authors' suites check, and the documented test of one passes."""

from __future__ import annotations

import json
from typing import Any

import pytest

import polyturn
from polyturn import compat
from polyturn.compat.verl.reward_score import default_compute_score
from polyturn.interactions.base import BaseInteraction
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.interactions.weather import WeatherInteraction
from polyturn.rewards.registry import rewards
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing import check_interaction, check_reward, check_scheduler, check_tool
from polyturn.tools.geo3k import Geo3kTool
from polyturn.tools.gsm8k import Gsm8kTool

ANSWER_SCHEMA = {
    "type": "function",
    "function": {
        "name": "calc_gsm8k_reward",
        "description": "Score an answer.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The answer."}},
            "required": ["answer"],
        },
    },
}


@polyturn.tool
async def add(a: int, b: int = 1) -> dict[str, int]:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return {"sum": a + b}


@pytest.mark.parametrize(
    "interaction",
    [BaseInteraction({"name": "base"}), Gsm8kInteraction({"name": "gsm8k"}), WeatherInteraction({"name": "weather"})],
)
async def test_interactions(interaction: Any) -> None:
    await check_interaction(interaction, says=["#### 5", "#### 4"], ground_truth="4", query="2+2?")


async def test_tools() -> None:
    calls = [{"answer": "5"}, {"answer": "4"}, {"answer": "4"}]
    await check_tool(Gsm8kTool({}, ANSWER_SCHEMA), calls=calls, create_kwargs={"ground_truth": "4"})
    await check_tool(Geo3kTool({}, ANSWER_SCHEMA), calls=calls, create_kwargs={"ground_truth": "4"})
    await check_tool(add, calls=[{"a": 1}, {"a": 1, "b": 2}])


@pytest.mark.parametrize(
    ("name", "expected", "truth"),
    [
        ("gsm8k", {"#### 4": 1.0, "#### 5": 0.0, "4": 0.0}, "4"),
        ("gsm8k_flexible", {"It is 4": 1.0, "It is 5": 0.0}, "4"),
        ("exact_match", {"Paris.": 1.0, "London": 0.0}, ["paris"]),
        ("math", {r"\boxed{\frac{1}{2}}": 1.0, r"\boxed{0.5}": 1.0, "0.5": 0.0}, "1/2"),
        ("math_dapo", {"Answer: 4": 1.0, "Answer: 5": -1.0}, "4"),
        ("geo3k", {r"\boxed{4}": 0.9, r"\boxed{5}": 0.0}, "4"),
        ("search_r1", {"<answer>Ada</answer>": 1.0, "<answer>Bob</answer>": 0.0}, {"target": ["ada"]}),
    ],
)
async def test_rewards(name: str, expected: dict[str, float], truth: Any) -> None:
    await check_reward(rewards.resolve(name), expected, ground_truth=truth)


async def test_the_one_function_of_all_data_sources() -> None:
    await check_reward(default_compute_score, {"#### 4": 1.0}, ground_truth="4", data_source="openai/gsm8k")


async def test_schedulers() -> None:
    call = f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': {'a': 1}})}\n</tool_call>"
    interactions = {"gsm8k": Gsm8kInteraction({"name": "gsm8k"})}
    row = {"data_source": "openai/gsm8k", "interaction": "gsm8k"}
    await check_scheduler(
        MultiTurnScheduler(), says=[call, "#### 5", "#### 4"], tools=[add], interactions=interactions, **row
    )


USERS_CLASS = """
import polyturn.compat.verl
from verl.interactions.base import BaseInteraction


class YourInteraction(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)
        self._instance_dict = {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        instance_id = await super().start_interaction(instance_id)
        self._instance_dict[instance_id] = {"attempts": 0, "ground_truth": ground_truth}
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        instance = self._instance_dict[instance_id]
        instance["attempts"] += 1
        return instance["attempts"] > 2, "Good attempt, but try to improve...", 0.5, {}

    async def finalize_interaction(self, instance_id, **kwargs):
        del self._instance_dict[instance_id]
"""

DOCUMENTED_TEST = """
async def test_interaction_workflow():
    interaction = YourInteraction({})

    # Test complete workflow
    instance_id = await interaction.start_interaction(ground_truth="expected_answer")

    messages = [{"role": "user", "content": "user_content"}, {"role": "assistant", "content": "assistant_content"}]
    should_terminate, response, reward, metadata = await interaction.generate_response(instance_id, messages)

    assert should_terminate in [True, False]
    assert isinstance(reward, float)

    await interaction.finalize_interaction(instance_id)
"""

THREE_LINES = """
from polyturn.testing import check_interaction

async def test_contract():
    await check_interaction(YourInteraction({}), ground_truth="4")
"""


async def test_documented_test_of_an_interaction_passes() -> None:
    """Users copied this test from the documentation of the interface."""
    names: dict[str, Any] = {}
    compat.install("verl")  # another test may have taken it back
    exec(USERS_CLASS + DOCUMENTED_TEST + THREE_LINES, names)
    await names["test_interaction_workflow"]()
    await names["test_contract"]()
