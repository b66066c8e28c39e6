"""Gsm8kInteraction: what it answers, and what it scores."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from polyturn.interactions.gsm8k import Gsm8kInteraction

RIGHT = "Your response is correct!"
WRONG = "Your response is incorrect! You need to reflect on your answer and try again."


async def answer(messages: list[dict], *, ground_truth: str | None = "72") -> tuple:
    partner = Gsm8kInteraction({})
    instance_id = await partner.start_interaction(ground_truth=ground_truth)
    try:
        return await partner.generate_response(instance_id, messages, name="gsm8k", query="...", ground_truth=ground_truth)
    finally:
        await partner.finalize_interaction(instance_id)
        assert partner._instance_dict == {}


async def test_a_right_answer_ends_the_conversation() -> None:
    assert await answer([{"role": "assistant", "content": "so #### 72"}]) == (True, RIGHT, 1.0, {})


async def test_a_wrong_answer_asks_for_another_try() -> None:
    assert await answer([{"role": "assistant", "content": "#### 73"}]) == (False, WRONG, 0.0, {})


async def test_only_the_last_assistant_message_counts() -> None:
    messages = [
        {"role": "assistant", "content": "#### 72"},
        {"role": "assistant", "content": "no, #### 1"},
        {"role": "user", "content": "#### 72"},
        {"role": "tool", "content": "#### 72"},
    ]
    assert await answer(messages) == (False, WRONG, 0.0, {})


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user", "content": "#### 72"}],
        [{"role": "assistant"}],
        [{"role": "assistant", "content": None}],
        [{"role": "assistant", "content": [{"type": "text", "text": "#### 72"}]}],
    ],
)
async def test_no_text_scores_zero(messages: list[dict]) -> None:
    assert await answer(messages) == (False, WRONG, 0.0, {})


async def test_the_scorer_is_called_through_its_module() -> None:
    """Users' tests replace the scorer in `polyturn.rewards.gsm8k`."""
    with patch("polyturn.rewards.gsm8k.compute_score", return_value=0.5) as scorer:
        assert await answer([{"role": "assistant", "content": "x"}]) == (False, WRONG, 0.5, {})
    scorer.assert_called_once_with("x", "72", method="strict", format_score=0.0, score=1.0)


async def test_episodes_do_not_share_state() -> None:
    partner = Gsm8kInteraction({"name": "gsm8k"})
    await partner.start_interaction("a", ground_truth="1")
    await partner.start_interaction("b", ground_truth="2")
    said = [{"role": "assistant", "content": "#### 2"}]
    assert [(await partner.generate_response(i, said))[2] for i in "ab"] == [0.0, 1.0]
    await partner.finalize_interaction("a")
    assert await partner.calculate_score("b") == 1.0
    with pytest.raises(KeyError):
        await partner.finalize_interaction("a")
