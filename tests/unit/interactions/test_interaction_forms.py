"""Interactions written in other forms run alike; the shipped weather and GSM8K interactions."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import patch

import pytest
from PIL import Image

from polyturn.core.errors import InteractionError
from polyturn.core.messages import Message
from polyturn.core.task import InteractionRef
from polyturn.interactions.adapters import in_usual_form
from polyturn.interactions.base import BaseInteraction, ViewInteraction
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.interactions.weather import WeatherInteraction
from polyturn.rollout.interaction_session import InteractionSession, LoadedInteraction
from polyturn.tools.schema import ToolResponse
from support.parts import Says
from support.refusals import refuses_later


class WithoutIds(BaseInteraction):
    ended = 0

    async def calculate_score(self) -> float:  # type: ignore[override]
        return 0.5

    async def finalize_interaction(self) -> None:  # type: ignore[override]
        self.ended += 1

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        return False, "go on", None, None


async def test_methods_may_take_no_id_and_scores_may_be_none() -> None:
    mine = WithoutIds({"name": "mine"})
    partner = InteractionSession(LoadedInteraction(mine, "mine", timeout_s=60), InteractionRef(name="mine"))
    await partner.start("e")
    reply = await partner.reply([])
    assert (reply.content, reply.score, reply.metadata) == ("go on", None, {})
    assert await partner.final_score() == 0.5
    assert await partner.close() is None
    assert mine.ended == 1
    usual = BaseInteraction({})
    assert in_usual_form(usual) is usual


class Reads(BaseInteraction):
    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        return True, kwargs["ground_truth"], 1.0, {}


class Silent(BaseInteraction):
    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        return kwargs["ends"], None, 0.0, {}


async def test_reply_without_text_must_end_the_episode() -> None:
    def session(*, ends: bool) -> InteractionSession:
        loaded = LoadedInteraction(Silent({}), "mine", timeout_s=60)
        return InteractionSession(loaded, InteractionRef(name="mine", kwargs={"ends": ends}))

    last, early = session(ends=True), session(ends=False)
    await last.start("a")
    await early.start("b")
    assert (await last.reply([])).is_done
    await refuses_later(lambda: early.reply([]), InteractionError, "generate_response", "None", "return a text, or True")
    await last.close()
    await early.close()


async def test_missing_column_of_an_interaction_is_reported() -> None:
    ref = InteractionRef(name="mine", kwargs={"answer": "4", "item": "lamp"})
    session = InteractionSession(LoadedInteraction(Reads({}), "mine", timeout_s=60), ref)
    await session.start("e")
    await refuses_later(lambda: session.reply([]), InteractionError, "'ground_truth'", "answer, item")
    await session.close()


class Replies(ViewInteraction):
    reply_timeout_s = 0.05

    async def respond(self, view: Any, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        await asyncio.sleep(0 if messages else 3600)
        return False, ToolResponse(image=["/there/is/no.png"]), 0.0, {}


async def test_error_of_a_reply_names_its_method_and_its_own_deadline() -> None:
    session = InteractionSession(LoadedInteraction(Replies({}), "slow", timeout_s=60), InteractionRef(name="slow"))
    await session.start("e")
    await refuses_later(lambda: session.reply([]), InteractionError, "respond took longer than 0.05 s", "reply_timeout_s")
    await refuses_later(lambda: session.reply([said("Hi.")]), InteractionError, "respond: ", "no.png")
    await session.close()


PICTURE = Image.new("RGB", (28, 28), "red")


@pytest.mark.parametrize(
    "content",
    [
        ToolResponse(text="hi", image=[PICTURE]),
        [{"type": "image", "image": PICTURE}, "hi"],
        ({"image": PICTURE}, {"type": "text", "text": "hi"}),
    ],
)
async def test_reply_may_show_images(content: Any) -> None:
    session = InteractionSession(LoadedInteraction(Says(content), "user", timeout_s=60), InteractionRef(name="user"))
    await session.start("e")
    message = Message(role="user", content=(await session.reply([])).content)
    assert (message.text, [medium.kind for medium in message.media]) == ("hi", ["image"])
    await session.close()


async def test_weather_interaction_looks_for_a_tool_answer() -> None:
    partner = WeatherInteraction({"name": "weather"})
    await partner.start_interaction("e")
    asked = [{"role": "user", "content": "How is it?"}, {"role": "assistant", "content": "Fine."}]
    done, said, score, _ = await partner.generate_response("e", asked)
    assert (done, said, score) == (True, "Please use the weather tool to get the weather information.", 0.0)
    done, said, score, _ = await partner.generate_response("e", [*asked, {"role": "tool", "content": "20 degrees"}])
    assert (done, said, score) == (True, "Thank you for your weather query!", 1.0)
    await partner.finalize_interaction("e")
    with pytest.raises(KeyError):
        await partner.finalize_interaction("e")


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
