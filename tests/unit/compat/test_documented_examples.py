"""The example classes of verl's documentation run unmodified from a config file."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.task import InteractionRef, Task
from polyturn.core.trajectory import Trajectory
from polyturn.infra.plugins import import_attr
from polyturn.interactions.registry import initialize_interactions_from_config
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context

FILES = Path(__file__).parents[2] / "data" / "verl"


async def run(class_name: str, says: Any, **kwargs: Any) -> tuple[Trajectory, Any]:
    name = "mine"
    interactions = initialize_interactions_from_config(
        {"interaction": [{"name": name, "class_name": class_name, "config": {"solver_type": "advanced"}}]}, base=FILES
    )
    context = scripted_context(says, interactions=interactions)
    task = Task(
        id="t",
        prompt=(Message(role="user", content="What is 2+2?"),),
        interaction=InteractionRef(name=name, kwargs={"name": name, "query": "What is 2+2?", **kwargs}),
    )
    trajectory = await run_episode(context, task, id="e")
    assert context.num_live_interactions == 0
    assert interactions[name]._instance_dict == {}  # type: ignore[attr-defined]
    return trajectory, interactions[name]


async def test_gsm8k_class_asks_again_until_the_answer_is_right() -> None:
    trajectory, made = await run("documented.py:Gsm8kInteraction", ["#### 5", "Wait. #### 4"], ground_truth="4")
    assert type(made).__mro__[1].__module__ == "polyturn.interactions.base"
    assert (made.name, made.config) == ("mine", {"solver_type": "advanced", "name": "mine"})
    assert trajectory.turn_scores == (0.0, 1.0)
    assert trajectory.stop_reason is StopReason.ENV_DONE
    assert trajectory.reward is not None and trajectory.reward.total == 1.0
    assert [m.text for m in trajectory.messages[2::2]] == [
        "Your response is incorrect! You need to reflect on your answer and try again.",
        "Your response is correct!",
    ]


async def test_multi_step_class_counts_its_attempts() -> None:
    trajectory, _ = await run("documented_multi_step.py:MultiStepInteraction", ["a", "b", "c"], ground_truth="4")
    assert trajectory.turn_scores == pytest.approx((0.1, 0.6, 1.1))
    assert trajectory.messages[-1].text == "Excellent work!"


async def test_custom_scoring_class_decides() -> None:
    trajectory, _ = await run("documented_scoring.py:CustomInteraction", ["five", "it is 4"], ground_truth="4")
    assert trajectory.turn_scores == (0.0, 1.0)


async def test_documented_test_passes_on_a_users_class() -> None:
    """The workflow test of the document, on the document's class."""
    interaction = import_attr("documented.py:Gsm8kInteraction", base=FILES)({})
    instance_id = await interaction.start_interaction(ground_truth="expected_answer")
    messages = [{"role": "user", "content": "user_content"}, {"role": "assistant", "content": "assistant_content"}]
    should_terminate, _response, reward, _metadata = await interaction.generate_response(instance_id, messages)
    assert should_terminate in [True, False]
    assert isinstance(reward, float)
    with patch("verl.utils.reward_score.gsm8k.compute_score", return_value=1.0):
        assert (await interaction.generate_response(instance_id, messages))[0]
    await interaction.finalize_interaction(instance_id)
