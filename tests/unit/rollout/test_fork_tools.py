"""Forks of a conversation have tools of their own where these can be snapshotted; else they share, and a run says so."""

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
    """Keeps notes, and says nothing of how they survive."""

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
    """Can be put back; the state that it gives away is the live one."""

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
    """Name the fork and the turn."""
    conversation, _, turn = request.request_id.rpartition("/")
    return NOTE % f"{conversation.partition('#')[2] or 'root'}.{turn}" if int(turn) < 3 else "done"


async def notes_of(tool: SharedNotes) -> list[str]:
    context = scripted_context(says, tools=[tool], scheduler=Forks(), limits=Limits(max_turns=8))
    found = await run_episode(context, task(tools=("note",)), id="e")
    assert found.error is None, found.error
    assert tool.notes == {} and tool.calls["create"] == tool.calls["release"]
    assert found.reward is not None
    return [str(turn.tool_results[0].content) for turn in found.turns if turn.tool_results]


async def test_each_fork_has_notes_of_its_own_that_go_on_from_where_it_began():
    tool = Notes()
    notes = set(await notes_of(tool))
    assert {"root.0", "root.0 1.1", "root.0 1.1 1.2", "root.0 2.1", "root.0 2.1 2.2"} <= notes
    assert "root.0 3.1 3.2" in notes, "the one that began before the first note took it itself, once"
    assert tool.calls["create"] == 4, "the conversation's, and one for each fork"


async def test_what_cannot_be_put_back_is_shared():
    tool = SharedNotes()
    notes = await notes_of(tool)
    assert tool.calls["create"] == 1 and max(len(n.split()) for n in notes) == 8


async def test_a_tool_that_cannot_be_put_back_after_all_fails_the_trajectory():
    class Torn(Notes):
        async def snapshot(self, instance_id: str) -> Any:
            return ["torn"]

    tool = Torn()
    context = scripted_context(says, tools=[tool], scheduler=Forks(), limits=Limits(max_turns=8))
    found = await run_episode(context, task(tools=("note",)), id="e")
    assert found.error is not None and found.error.startswith(SnapshotError.__name__)
    assert tool.notes == {} and tool.calls["create"] == tool.calls["release"]


@pytest.mark.parametrize("where", ["state", "agent_data"])
async def test_what_cannot_be_copied_is_named(where: str):
    class Locked(Notes):
        async def execute(self, instance_id: str, parameters: dict[str, Any], agent_data: Any = None, **kwargs: Any) -> str:
            if where == "agent_data":
                agent_data.extra_fields["lock"] = threading.Lock()
            return await super().execute(instance_id, parameters)

        async def snapshot(self, instance_id: str) -> Any:
            return threading.Lock() if where == "state" else self.notes[instance_id]

    context = scripted_context(says, tools=[Locked()], scheduler=Forks(), limits=Limits(max_turns=8))
    found = await run_episode(context, task(tools=("note",)), id="e")
    what = "what the tool 'note' keeps" if where == "state" else "what tools left in agent_data"
    assert found.error is not None and found.error.startswith(
        f"{SnapshotError.__name__}: {what} cannot be copied for a fork"
    )


async def test_a_fork_whose_tools_were_cut_off_at_their_beginning_begins_them_again():
    reached = asyncio.Event()

    class Slow(Notes):
        is_slow = True

        async def restore(self, instance_id: str, state: Any) -> None:
            if self.is_slow:
                self.is_slow = False
                reached.set()
                await asyncio.sleep(60)
            await super().restore(instance_id, state)

    def note(text: str) -> list[ToolCall]:
        return [ToolCall(id="c", name="note", arguments={"text": text})]

    tool = Slow()
    async with ToolBox([tool]).session("e") as session:
        await session.start(task(tools=("note",)))
        await session.call(note("root"))
        branch = ForkTools(session, id="e#1", states=None)
        begins = asyncio.create_task(branch.session())
        await reached.wait()
        begins.cancel()
        with pytest.raises(asyncio.CancelledError):
            await begins
        (said,) = await (await branch.session()).call(note("fork"))
        assert said.content == "root fork"
        assert tool.notes == {"e": ["root"], "e#1": ["root", "fork"]}
        assert await branch.close() == []
    assert tool.notes == {} and tool.calls["create"] == tool.calls["release"] == 3


async def test_a_fork_does_not_see_what_happens_while_its_tools_begin():
    class Slow(Notes):
        async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
            await asyncio.sleep(0.005)
            return await super().create(instance_id)

    tool = Slow()
    async with ToolBox([tool]).session("e") as session:
        await session.start(task(tools=("note",)))
        branch = ForkTools(session, id="e#1", states=None)
        beginning = asyncio.create_task(branch.session())
        await asyncio.sleep(0.001)
        await session.call([ToolCall(id="c", name="note", arguments={"text": "later"})])
        await beginning
        assert tool.notes == {"e": ["later"], "e#1": []}
        await branch.close()


def test_a_run_says_which_tools_its_forks_share(caplog: pytest.LogCaptureFixture):
    summary = type("Summary", (), {"num_tasks": 1, "interactions": {}, "num_with_tools": 1, "unknown_tools": {}})
    for tool, is_told in ((SharedNotes(), True), (Notes(), False)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            check_use(scripted_context(["x"], tools=[tool], scheduler=Forks()), {"train": summary})  # type: ignore[dict-item]
        assert ("Forks goes on from one place in several ways, and of 'note' all" in caplog.text) is is_told


async def test_a_look_ahead_finds_the_tools_where_they_stood_and_leaves_them_so():
    """Continuations come last, when the conversation has taken all its notes; they see those of their own turn."""

    class Asks(BaseInteraction):
        async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
            return sum(m["role"] == "user" for m in messages) >= 3, "And?", 0.0, {}

    def speaks(request: Any) -> str:
        conversation, _, turn = request.request_id.rpartition("/")
        return "Yes." if int(turn) % 2 == 0 else NOTE % f"{conversation.partition('#')[2] or 'root'}.{turn}"

    tool = Notes()
    async with serve(lambda asked, number: {"choices": [{"message": {"role": "assistant", "content": "1"}}]}) as server:
        scheduler = Lookahead(judge={"base_url": server.url, "model": "j"}, num_repeat_rollouts=1, window=2)
        context = scripted_context(
            speaks, tools=[tool], interactions={"user": Asks({})}, scheduler=scheduler, limits=Limits(max_turns=6)
        )
        one = dataclasses.replace(task("Hello.", data_source=None, tools=("note",)), interaction=InteractionRef(name="user"))
        found = await run_episode(context, one, id="e")
    assert found.error is None, found.error
    shown = [m.text for segment in [found.turns] for turn in segment for m in turn.observation if m.role == "tool"]
    assert shown == ["root.1", "root.1 root.3"][: len(shown)] and shown
    assert tool.notes == {} and tool.calls["create"] == tool.calls["release"] > 1
