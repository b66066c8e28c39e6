"""The example of agents that speak A2A, as a tool and as an interaction, against a real agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("a2a", reason="pip install 'polyturn[a2a]'")

from a2a_agent import CONVERT, served  # type: ignore[import-not-found]

from polyturn.core.errors import ConfigError, ToolConnectionError, ToolTimeoutError, UnknownNameError
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import ToolCall
from polyturn.core.task import Task
from polyturn.infra.plugins import import_attr
from polyturn.interactions.registry import initialize_interactions_from_config
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task
from polyturn.tools.episode_tools import EpisodeTools
from polyturn.tools.registry import initialize_tools_from_config
from polyturn.tools.schema import OpenAIFunctionToolSchema
from polyturn.tools.toolbox import Toolbox
from support.refusals import refuses, refuses_later
from support.tools_parts import until

EXAMPLES = Path(__file__).parents[3] / "examples"
A2AInteraction = import_attr("a2a_agents.py:A2AInteraction", base=EXAMPLES)
Conversation = import_attr("a2a_agents.py:Conversation", base=EXAMPLES)


def tools_of(url: str, *skills: str, **config: Any) -> Any:
    items = [
        {"class_name": "a2a_agents.py:A2ATool", "config": {"type": "native", "url": url, "skill": skill, **config}}
        for skill in skills
    ]
    return initialize_tools_from_config({"tools": items}, base=EXAMPLES)


@pytest.mark.parametrize("streaming", [True, False])
async def test_skills_are_tools_and_an_episode_is_one_conversation(streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_TOKEN", "secret")
    with served(streaming=streaming, token="secret") as (url, agent):
        tools = tools_of(url, "ask it", "convert", token_env="AGENT_TOKEN")
        assert [t.name for t in tools] == ["ask_it", "convert"]
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
            (converted,) = await session.call([ToolCall(id="c", name="convert", arguments={"to": "EUR", "amount": 2})])
            assert "done: convert to EUR" in str(converted.content)
        assert len(agent.cancelled) == 1, "the task that waits for more is cancelled with the episode"


async def test_late_agent_is_told_to_stop_and_a_lost_one_is_unreachable() -> None:
    with served() as (url, agent):
        conversation = Conversation({"url": url, "timeout": 0.5})
        await refuses_later(lambda: conversation.ask({"text": "hang"}), ToolTimeoutError, "0.5 s")
        await until(lambda: len(agent.cancelled) == 1)
    conversation.config = {"url": url, "timeout": 60}
    with pytest.raises(ToolConnectionError):
        await conversation.ask({"text": "talk"})
    await conversation.close()


async def test_agent_scores_an_episode_and_its_failure_is_not_the_models() -> None:
    with served() as (url, _):
        partner = A2AInteraction({"url": url})
        row = task(data_source=None, interaction="p")
        says = ["talk of Rome", "talk of trains", "talk of nothing"]
        talked = await run_episode(scripted_context(says, interactions={"p": partner}), row, id="a")
        assert talked.stop_reason is StopReason.ENV_DONE
        assert [t.score for t in talked.turns] == [0.25, 0.5, 0.75]
        failed = await run_episode(scripted_context(["crash"], interactions={"p": partner}), row, id="b")
        assert "ToolError" in str(failed.error)


def test_agent_without_a_card_or_the_skill_is_a_config_error() -> None:
    refuses(lambda: tools_of("http://127.0.0.1:9", "ask"), ConfigError, "http://127.0.0.1:9/.well-known")
    with served() as (url, _):
        refuses(lambda: tools_of(url, "ask"), ConfigError, "'ask'", "'ask it'")


def test_schema_becomes_a_skill_and_comes_back_whole() -> None:
    skill = CONVERT.to_a2a_skill(tags=["money"])
    assert (skill.id, list(skill.tags), list(skill.input_modes)) == ("convert", ["money"], ["application/json"])
    assert OpenAIFunctionToolSchema.from_a2a_skill(skill).to_dict() == CONVERT.to_dict()


def test_retired_name_names_the_example() -> None:
    tool = {"tools": [{"class_name": "polyturn.tools.a2a.A2ATool", "config": {}}]}
    refuses(lambda: initialize_tools_from_config(tool), UnknownNameError, "a2a_agents.py:A2ATool")
    interaction = {"interaction": [{"name": "p", "class_name": "polyturn.interactions.a2a.A2AInteraction", "config": {}}]}
    refuses(lambda: initialize_interactions_from_config(interaction), UnknownNameError, "a2a_agents.py:A2AInteraction")
