"""Gsm8kInteraction: its replies and scores."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from polyturn.interactions.gsm8k import Gsm8kInteraction

RIGHT = (True, "Your response is correct!", 1.0, {})
WRONG = (False, "Your response is incorrect! You need to reflect on your answer and try again.", 0.0, {})


def said(content: Any, role: str = "assistant") -> dict[str, Any]:
    return {"role": role, "content": content}


async def answer(messages: list[dict[str, Any]], *, ground_truth: str | None = "72") -> Any:
    interaction = Gsm8kInteraction({})
    instance_id = await interaction.start_interaction(ground_truth=ground_truth)
    try:
        return await interaction.generate_response(
            instance_id, messages, name="gsm8k", query="...", ground_truth=ground_truth
        )
    finally:
        await interaction.finalize_interaction(instance_id)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([said("so #### 72")], RIGHT),
        ([said("#### 73")], WRONG),
        ([said("#### 72"), said("no, #### 1"), said("#### 72", "user"), said("#### 72", "tool")], WRONG),
        ([], WRONG),
        ([{"role": "assistant"}], WRONG),
        ([said(None)], WRONG),
        ([said([{"type": "text", "text": "#### 72"}])], WRONG),
    ],
)
async def test_last_assistant_message_is_scored(messages: list[dict[str, Any]], expected: Any) -> None:
    assert await answer(messages) == expected


async def test_scorer_is_called_through_its_module() -> None:
    """Users' tests replace the scorer in `polyturn.rewards.gsm8k`."""
    with patch("polyturn.rewards.gsm8k.compute_score", return_value=0.5) as scorer:
        assert await answer([said("x")]) == (False, WRONG[1], 0.5, {})
    scorer.assert_called_once_with("x", "72", method="strict", format_score=0.0, score=1.0)


async def test_episodes_do_not_share_state() -> None:
    interaction = Gsm8kInteraction({"name": "gsm8k"})
    await interaction.start_interaction("a", ground_truth="1")
    await interaction.start_interaction("b", ground_truth="2")
    assert [(await interaction.generate_response(i, [said("#### 2")]))[2] for i in "ab"] == [0.0, 1.0]
    await interaction.finalize_interaction("a")
    assert await interaction.calculate_score("b") == 1.0
    with pytest.raises(KeyError):
        await interaction.finalize_interaction("a")
