"""Agents that speak A2A, as tools and as interactions, against a real agent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("a2a", reason="pip install 'polyturn[a2a]'")

from a2a_agent import CONVERT, served  # type: ignore[import-not-found]
from aiohttp import web
from aiohttp.test_utils import TestServer

from polyturn.core.errors import ConfigError, ToolConnectionError, ToolTimeoutError
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import ToolCall
from polyturn.core.task import Task
from polyturn.interactions.a2a import A2AInteraction
from polyturn.rollout.run_episode import run_episode
from polyturn.testing import check_interaction, check_tool
from polyturn.testing.episodes import scripted_context, task
from polyturn.tools.a2a import A2ATool
from polyturn.tools.a2a_client import A2AAgent, A2AConversation
from polyturn.tools.episode_tools import EpisodeTools
from polyturn.tools.registry import initialize_tools_from_config
from polyturn.tools.schema import OpenAIFunctionToolSchema
from polyturn.tools.toolbox import Toolbox
from support.refusals import refuses, refuses_later
from support.tools_parts import until


def tools_of(url: str, **config: Any) -> Any:
    item = {"class_name": "polyturn.tools.a2a.A2ATool", "config": {"type": "native", "url": url, **config}}
    return initialize_tools_from_config({"tools": [item]})


@pytest.mark.parametrize("streaming", [True, False])
async def test_skills_are_tools_and_an_episode_is_one_conversation(streaming: bool) -> None:
    with served(streaming=streaming, token="secret") as (url, agent):
        tools = tools_of(url, token="secret", timeout=120)
        assert [t.name for t in tools] == ["ask_it", "convert"]
        assert "Example: book a flight" in tools[0].schema["function"]["description"]
        assert tools[0].schema["function"]["parameters"]["required"] == ["message"]
        assert tools[1].schema == CONVERT.to_dict(), "a schema of ours comes back whole"
        async with EpisodeTools(Toolbox(tools), "e") as session:
            await session.start(Task(id="t", prompt=()))

            async def ask(message: str) -> tuple[Any, str | None]:
                call = ToolCall(id="c", name="ask_it", arguments={"message": message})
                (result,) = await session.call([call])
                return result.content, result.error

            assert await ask("talk") == ("turn 1: talk", None)
            content, error = await ask("paint")
            assert error is None
            assert content[0]["image"].startswith("data:image/png")
            assert content[1]["text"] == 'done: paint\n{"turn": 2.0}'
            assert await ask("book a flight") == ("Where to?", None)
            assert (await ask("book it to Rome"))[0][1]["text"].startswith("done: book it to Rome")
            text, error = await ask("forbidden")
            assert (error, "I may not." in text) == ("tool_error", True)
            assert (await ask("crash"))[1] == "tool_error"
            assert (await ask("talk"))[0].startswith("turn 7"), "all of it was one conversation"
            assert await ask("book another") == ("Where to?", None)
            call = ToolCall(id="c", name="convert", arguments={"to": "EUR", "amount": 2})
            (converted,) = await session.call([call])
            assert "done: convert to EUR" in str(converted.content)
        assert len(agent.cancelled) == 1, "the task that waits for more is cancelled with the episode"
        assert tools[0].agent.num_users == 0


async def test_late_agent_is_told_to_stop_and_a_lost_one_is_unreachable() -> None:
    with served() as (url, agent):
        asked = A2AAgent(url)
        asked.open()
        conversation = A2AConversation()
        await refuses_later(lambda: asked.ask(conversation, text="hang", timeout_s=0.5), ToolTimeoutError, "0.5 s")
        await until(lambda: len(agent.cancelled) == 1)
        many = [asked.ask(A2AConversation(), text=f"talk {n}", timeout_s=120) for n in range(32)]
        assert [a.text for a in await asyncio.gather(*many)] == [f"turn 1: talk {n}" for n in range(32)]
    with pytest.raises(ToolConnectionError):
        await asked.ask(conversation, text="talk", timeout_s=50)
    await asked.close()


async def test_agent_answers_the_turns_of_the_model_until_it_is_done() -> None:
    with served() as (url, agent):
        partner = A2AInteraction({"url": f"{url}/.well-known/agent-card.json", "name": "p", "timeout": 50})
        for name in ("one", "two"):
            assert await partner.start_interaction(name, name="p", brief="talk") == name
        said = [{"role": "user", "content": "Begin."}, {"role": "assistant", "content": "hello"}]
        first = await partner.generate_response("one", said, name="p", brief="talk")
        assert first == (False, "turn 1: talk\n\nhello", 0.25, {"state": "message", "score": 0.25, "done": False})
        said += [{"role": "user", "content": first[1]}, {"role": "assistant", "content": "talk more"}]
        assert (await partner.generate_response("one", said, brief="talk"))[:3] == (False, "turn 2: talk more", 0.5)
        assert (await partner.generate_response("two", said[:2], brief="talk"))[2] == 0.25, "a conversation of its own"
        assert (await partner.generate_response("one", said, brief="talk"))[0] is True
        asks = [{"role": "assistant", "content": "book a flight"}]
        assert (await partner.generate_response("two", asks))[:2] == (False, "Where to?")
        done, content, score, info = await partner.generate_response("two", [{"role": "assistant", "content": "to Rome"}])
        assert (done, score, info["state"]) == (True, 0.0, "completed")
        assert "done: to Rome" in content.text
        await asyncio.gather(partner.finalize_interaction("one"), partner.finalize_interaction("two"))
        assert partner.agent.num_users == 0
        assert not agent.cancelled


async def test_agent_scores_an_episode_and_its_failure_is_not_the_models() -> None:
    with served() as (url, _):
        partner = A2AInteraction({"url": url, "timeout": 50})
        row = task(data_source=None, interaction="p")
        says = ["talk of Rome", "talk of trains", "talk of nothing"]
        talked = await run_episode(scripted_context(says, interactions={"p": partner}), row, id="a")
        assert talked.stop_reason is StopReason.ENV_DONE
        assert [t.score for t in talked.turns] == [0.25, 0.5, 0.75]
        failed = await run_episode(scripted_context(["crash"], interactions={"p": partner}), row, id="b")
        assert "ToolError" in str(failed.error)
        assert partner.agent.num_users == 0


async def test_a2a_keeps_the_contracts_of_tools_and_interactions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyturn.testing.suites.common.LONGEST_BLOCK_S", 50.0)  # a busy machine holds the loop up
    with served() as (url, _):
        await check_tool(A2ATool({"url": url, "skill": "ask it"}), calls=[{"message": "talk"}, {"message": "book a flight"}])
        await check_interaction(A2AInteraction({"url": url, "name": "p"}), says=["talk", "talk more"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "`url`"),
        ({"url": "localhost:9000"}, "http"),
        ({"url": "http://127.0.0.1:9"}, r"http://127\.0\.0\.1:9 shows no card"),
    ],
)
def test_agent_that_cannot_work_is_a_config_error(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        initialize_tools_from_config({"tools": [{"class_name": "polyturn.tools.a2a.A2ATool", "config": config}]})


def test_unknown_skill_is_a_config_error() -> None:
    refuses(lambda: A2AInteraction({"url": "http://x", "timeout": 0}), ConfigError, "timeout is 0")
    with served() as (url, _):
        refuses(lambda: tools_of(url, skill="ask"), ConfigError, "'ask'", "'ask it'")
        assert [t.name for t in tools_of(url, skill="convert")] == ["convert"]


def test_schema_becomes_a_skill_and_comes_back_whole() -> None:
    skill = CONVERT.to_a2a_skill(tags=["money"])
    assert (skill.id, list(skill.tags), list(skill.input_modes)) == ("convert", ["money"], ["application/json"])
    assert OpenAIFunctionToolSchema.from_a2a_skill(skill).to_dict() == CONVERT.to_dict()


async def test_agent_that_shows_no_card_is_asked_again_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyturn.tools.a2a_client.CARD_S", 0.1)
    asked: list[str] = []
    over = asyncio.Event()

    async def silent(request: web.Request) -> web.Response:
        asked.append(request.path)
        await over.wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/{rest:.*}", silent)
    async with TestServer(app) as server:
        agent = A2AAgent(str(server.make_url("")))
        agent.open()
        for number in (1, 2):
            with pytest.raises(ToolTimeoutError, match=r"card within 0\.1 s"):
                await agent.ask(A2AConversation(), text="hi", timeout_s=0.5)
            assert len(asked) <= number
        await agent.close()
        over.set()
