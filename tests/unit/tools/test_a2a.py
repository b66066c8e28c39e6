"""Agents that speak A2A, as tools and as partners, against a real agent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("a2a", reason="pip install 'polyturn[a2a]'")

from a2a_agent import CONVERT, served  # type: ignore[import-not-found]

from polyturn.core.errors import ConfigError, ToolConnectionError, ToolTimeoutError
from polyturn.core.messages import ToolCall
from polyturn.core.task import Task
from polyturn.interactions.a2a import A2AInteraction
from polyturn.tools.a2a_client import A2AAgent, A2AConversation
from polyturn.tools.executor import ToolBox
from polyturn.tools.registry import initialize_tools_from_config
from polyturn.tools.schema import OpenAIFunctionToolSchema


def tools_of(url: str, **config: Any) -> Any:
    item = {"class_name": "polyturn.tools.a2a.A2ATool", "config": {"type": "native", "url": url, **config}}
    return initialize_tools_from_config({"tools": [item]})


@pytest.mark.parametrize("streaming", [True, False])
async def test_the_skills_of_an_agent_are_tools_and_an_episode_is_one_conversation(streaming: bool) -> None:
    with served(streaming=streaming, token="secret") as (url, agent):
        tools = tools_of(url, token="secret", timeout=120)
        assert [t.name for t in tools] == ["ask_it", "convert"]
        assert "Example: book a flight" in tools[0].schema["function"]["description"]
        assert tools[0].schema["function"]["parameters"]["required"] == ["message"]
        assert tools[1].schema == CONVERT.to_dict(), "a schema of ours comes back whole"
        async with ToolBox(tools).session("e") as session:
            await session.start(Task(id="t", prompt=()))

            async def ask(message: str) -> tuple[Any, str | None]:
                call = ToolCall(id="c", name="ask_it", arguments={"message": message})
                (result,) = await session.call([call])
                return result.content, result.error

            assert await ask("talk") == ("turn 1: talk", None)
            content, error = await ask("paint")
            assert error is None and content[0]["image"].startswith("data:image/png") is True
            assert content[1]["text"] == 'done: paint\n{"turn": 2.0}'
            assert await ask("book a flight") == ("Where to?", None)
            assert (await ask("book it to Rome"))[0][1]["text"].startswith("done: book it to Rome")
            assert await ask("forbidden") == ("Error (tool_error): the agent rejected the task: I may not.", "tool_error")
            text, error = await ask("crash")
            assert error == "tool_error" and "the agent" in str(text)
            assert (await ask("talk"))[0].startswith("turn 7"), "all of it was one conversation"
            assert await ask("book another") == ("Where to?", None)
            call = ToolCall(id="c", name="convert", arguments={"to": "EUR", "amount": 2})
            (converted,) = await session.call([call])
            assert "done: convert to EUR" in str(converted.content)
        assert len(agent.cancelled) == 1, "the task that waits for more is cancelled with the episode"
        assert tools[0].agent.num_users == 0 and tools[0].agent._client is None


async def test_an_agent_that_is_late_is_told_to_stop_and_one_that_is_gone_is_named() -> None:
    with served() as (url, agent):
        asked = A2AAgent(url)
        asked.open()
        conversation = A2AConversation()
        with pytest.raises(ToolTimeoutError, match=r"did not answer within 0\.5 s"):
            await asked.ask(conversation, text="hang", timeout_s=0.5)
        while not agent.cancelled:  # noqa: ASYNC110 (it runs in a thread)
            await asyncio.sleep(0.02)
        assert len(agent.cancelled) == 1
        many = [asked.ask(A2AConversation(), text=f"talk {n}", timeout_s=120) for n in range(32)]
        assert [a.text for a in await asyncio.gather(*many)] == [f"turn 1: talk {n}" for n in range(32)]
    with pytest.raises(ToolConnectionError, match="cannot be reached"):
        await asked.ask(conversation, text="talk", timeout_s=5)
    await asked.close()


async def test_an_agent_answers_the_turns_of_the_model_until_it_is_done() -> None:
    with served() as (url, agent):
        partner = A2AInteraction({"url": f"{url}/.well-known/agent-card.json", "name": "p", "timeout": 5})
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
        assert (done, score, info["state"]) == (True, 0.0, "completed") and "done: to Rome" in content.text
        await asyncio.gather(partner.finalize_interaction("one"), partner.finalize_interaction("two"))
        assert partner.agent.num_users == 0 and not agent.cancelled


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tools\[0\]: an A2A agent needs a `url`"):
        initialize_tools_from_config({"tools": [{"class_name": "polyturn.tools.a2a.A2ATool", "config": {}}]})
    with pytest.raises(ConfigError, match="write the http"):
        tools_of("localhost:9000")
    with pytest.raises(
        ConfigError, match=r"the A2A agent at http://127.0.0.1:9 shows no card: .*/.well-known/agent-card.json"
    ):
        tools_of("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="timeout is 0"):
        A2AInteraction({"url": "http://x", "timeout": 0})
    with served() as (url, _):
        with pytest.raises(ConfigError, match=r"has no skill 'ask'\. Did you mean 'ask it'"):
            tools_of(url, skill="ask")
        assert [t.name for t in tools_of(url, skill="convert")] == ["convert"]


def test_a_schema_goes_to_a_skill_and_back_whole() -> None:
    skill = CONVERT.to_a2a_skill(tags=["money"])
    assert (skill.id, list(skill.tags), list(skill.input_modes)) == ("convert", ["money"], ["application/json"])
    assert OpenAIFunctionToolSchema.from_a2a_skill(skill).to_dict() == CONVERT.to_dict()


async def test_an_agent_that_does_not_show_its_card_is_asked_again_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyturn.tools.a2a_client.CARD_S", 0.1)
    asked: list[bytes] = []
    over = asyncio.Event()

    async def silent(reading: asyncio.StreamReader, writing: asyncio.StreamWriter) -> None:
        asked.append(await reading.readline())
        await over.wait()
        writing.close()
        await writing.wait_closed()

    listening = await asyncio.start_server(silent, "127.0.0.1", 0)
    agent = A2AAgent(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    agent.open()
    for number in (1, 2):
        with pytest.raises(ToolTimeoutError, match=r"did not show its card within 0\.1 s"):
            await agent.ask(A2AConversation(), text="hi", timeout_s=0.5)
        assert len(asked) == number
    await agent.close()
    over.set()
    listening.close()
    await asyncio.sleep(0.05)
