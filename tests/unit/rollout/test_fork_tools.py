"""Forks of a conversation have tools of their own if the tools can be snapshotted; otherwise they share them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections import Counter
from typing import Any

import pytest

from polyturn.build.checks import check_use
from polyturn.core.errors import SnapshotError
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import ToolCall
from polyturn.core.task import InteractionRef
from polyturn.interactions.base import BaseInteraction
from polyturn.rollout.limits import Limits
from polyturn.rollout.resources import ForkTools
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.rollout.schedulers.lookahead import Lookahead
from polyturn.testing.episodes import scripted_context, task
from polyturn.tools.base import BaseTool
from polyturn.tools.executor import ToolBox
from support.services import serve

SCHEMA = {
    "type": "function",
    "function": {"name": "note", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}},
}
NOTE = '<tool_call>\n{"name": "note", "arguments": {"text": "%s"}}\n</tool_call>'


class SharedNotes(BaseTool):
    """Keeps notes and offers no snapshot."""

    def __init__(self) -> None:
        super().__init__({"type": "native"}, SCHEMA)
        self.notes: dict[str, list[str]] = {}
        self.calls: Counter[str] = Counter()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        assert instance_id is not None and instance_id not in self.notes
        self.calls["create"] += 1
        self.notes[instance_id] = []
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        await asyncio.sleep(0)
        self.notes[instance_id].append(parameters["text"])
        return " ".join(self.notes[instance_id])

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(len(self.notes[instance_id]))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.calls["release"] += 1
        del self.notes[instance_id]


class Notes(SharedNotes):
    """Can be restored; its snapshot is the live state."""

    async def snapshot(self, instance_id: str) -> Any:
        return self.notes[instance_id]

    async def restore(self, instance_id: str, state: Any) -> None:
        if state == ["torn"]:
            raise ValueError("torn")
        self.notes[instance_id] = state


class Forks(MultiTurnScheduler):
    """Takes a note, then goes on in two ways, each of which takes two notes of its own."""

    forks = True

    async def run(self, episode: Any) -> StopReason:
        await episode.prepare()
        turn = await episode.generate()
        mark = await episode.mark_with_tools()
        episode.record(turn, await episode.call_tools(turn))
        forks = [episode.fork(), episode.fork()]
        early = episode.fork(at=mark, is_unanswered=True)
        await self.settle(early, early.turns[-1])
        await self.run_forks([*forks, early])
        return StopReason.STOP


def says(request: Any) -> str:
    """Take a note that names the fork and the turn."""
    conversation, _, turn = request.request_id.rpartition("/")
    return NOTE % f"{conversation.partition('#')[2] or 'root'}.{turn}" if int(turn) < 3 else "done"


async def notes_of(tool: SharedNotes) -> list[str]:
    context = scripted_context(says, tools=[tool], scheduler=Forks(), limits=Limits(max_turns=8))
    found = await run_episode(context, task(tools=("note",)), id="e")
    assert found.error is None, found.error
    assert tool.notes == {} and tool.calls["create"] == tool.calls["release"]
    assert found.reward is not None
    return [str(turn.tool_results[0].content) for turn in found.turns if turn.tool_results]


async def test_each_fork_goes_on_with_its_own_notes() -> None:
    tool = Notes()
    notes = set(await notes_of(tool))
    assert {"root.0", "root.0 1.1", "root.0 1.1 1.2", "root.0 2.1", "root.0 2.1 2.2"} <= notes
    assert "root.0 3.1 3.2" in notes, "the fork at the early mark took the first note itself, once"
    assert tool.calls["create"] == 4, "the conversation's, and one for each fork"
    shared = SharedNotes()
    notes = await notes_of(shared)
    assert shared.calls["create"] == 1
    assert max(len(n.split()) for n in notes) == 8


class Odd(Notes):
    """Has a state, or leaves something in agent_data, that a fork cannot take over."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    async def execute(self, instance_id: str, parameters: dict[str, Any], agent_data: Any = None, **kwargs: Any) -> str:
        if self.where == "agent_data":
            agent_data.extra_fields["lock"] = threading.Lock()
        return await super().execute(instance_id, parameters)

    async def snapshot(self, instance_id: str) -> Any:
        return {"torn": ["torn"], "state": threading.Lock()}.get(self.where, self.notes[instance_id])


@pytest.mark.parametrize(("where", "key"), [("torn", "torn"), ("state", "'note'"), ("agent_data", "agent_data")])
async def test_state_that_a_fork_cannot_take_over_fails_the_trajectory(where: str, key: str) -> None:
    tool = Odd(where)
    context = scripted_context(says, tools=[tool], scheduler=Forks(), limits=Limits(max_turns=8))
    found = await run_episode(context, task(tools=("note",)), id="e")
    assert (found.error or "").startswith(SnapshotError.__name__)
    assert key in (found.error or "")
    assert tool.notes == {}
    assert tool.calls["create"] == tool.calls["release"]


def note(text: str) -> list[ToolCall]:
    return [ToolCall(id="c", name="note", arguments={"text": text})]


class Gated(Notes):
    """Waits at a gate while it is restored for a fork."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.gate = asyncio.Event(), asyncio.Event()

    async def restore(self, instance_id: str, state: Any) -> None:
        self.reached.set()
        await self.gate.wait()
        await super().restore(instance_id, state)


async def test_cancelled_start_of_a_forks_tools_starts_again() -> None:
    tool = Gated()
    async with ToolBox([tool]).session("e") as session:
        await session.start(task(tools=("note",)))
        await session.call(note("root"))
        branch = ForkTools(session, id="e#1", states=None)
        begins = asyncio.create_task(branch.session())
        await tool.reached.wait()
        begins.cancel()
        with pytest.raises(asyncio.CancelledError):
            await begins
        tool.gate.set()
        (said,) = await (await branch.session()).call(note("fork"))
        assert said.content == "root fork"
        assert tool.notes == {"e": ["root"], "e#1": ["root", "fork"]}
        assert await branch.close() == []
    assert tool.notes == {}
    assert tool.calls["create"] == tool.calls["release"] == 3


async def test_fork_does_not_see_calls_while_its_tools_start() -> None:
    tool = Gated()
    async with ToolBox([tool]).session("e") as session:
        await session.start(task(tools=("note",)))
        branch = ForkTools(session, id="e#1", states=None)
        beginning = asyncio.create_task(branch.session())
        await tool.reached.wait()
        await session.call(note("later"))
        tool.gate.set()
        await beginning
        assert tool.notes == {"e": ["later"], "e#1": []}
        await branch.close()


def test_run_warns_of_tools_that_its_forks_share(caplog: pytest.LogCaptureFixture) -> None:
    summary = type("Summary", (), {"num_tasks": 1, "interactions": {}, "num_with_tools": 1, "unknown_tools": {}})
    for tool, is_warned in ((SharedNotes(), True), (Notes(), False)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            check_use(scripted_context(["x"], tools=[tool], scheduler=Forks()), {"train": summary})  # type: ignore[dict-item]
        assert ("'note'" in caplog.text) is is_warned


class Asks(BaseInteraction):
    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        return sum(m["role"] == "user" for m in messages) >= 3, "And?", 0.0, {}


async def test_lookahead_leaves_the_tools_as_they_were() -> None:
    """Continuations come last, when the conversation has taken all its notes; they see those of their own turn."""

    def speaks(request: Any) -> str:
        conversation, _, turn = request.request_id.rpartition("/")
        return "Yes." if int(turn) % 2 == 0 else NOTE % f"{conversation.partition('#')[2] or 'root'}.{turn}"

    tool = Notes()
    async with serve(lambda asked, number: {"choices": [{"message": {"role": "assistant", "content": "1"}}]}) as server:
        scheduler = Lookahead(judge={"base_url": server.url, "model": "j"}, num_repeat_rollouts=1, window=2)
        parts = {"tools": [tool], "interactions": {"user": Asks({})}, "scheduler": scheduler}
        context = scripted_context(speaks, limits=Limits(max_turns=6), **parts)
        one = dataclasses.replace(task("Hello.", data_source=None, tools=("note",)), interaction=InteractionRef(name="user"))
        found = await run_episode(context, one, id="e")
    assert found.error is None, found.error
    shown = [m.text for turn in found.turns for m in turn.observation if m.role == "tool"]
    assert shown
    assert shown == ["root.1", "root.1 root.3"][: len(shown)]
    assert tool.notes == {}
    assert tool.calls["create"] == tool.calls["release"] > 1
