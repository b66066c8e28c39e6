"""Forks of a conversation share its tools, and a run names the tools whose state they share."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from polyturn.build.checks import check_use
from polyturn.core.lifecycle import StopReason
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing.episodes import scripted_context, task
from polyturn.tools.base import BaseTool

SCHEMA = {
    "type": "function",
    "function": {"name": "note", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}},
}
NOTE = '<tool_call>\n{"name": "note", "arguments": {"text": "%s"}}\n</tool_call>'


class Notes(BaseTool):
    """Keeps notes, and can be restored."""

    def __init__(self) -> None:
        super().__init__({"type": "native"}, SCHEMA)
        self.notes: dict[str, list[str]] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        assert instance_id is not None and instance_id not in self.notes
        self.notes[instance_id] = []
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        self.notes[instance_id].append(parameters["text"])
        return " ".join(self.notes[instance_id])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.notes[instance_id]

    async def snapshot(self, instance_id: str) -> Any:
        return self.notes[instance_id]

    async def restore(self, instance_id: str, state: Any) -> None:
        self.notes[instance_id] = state


class Stateless(Notes):
    stateless = True
    snapshot = None  # type: ignore[assignment]
    restore = None  # type: ignore[assignment]


class Forks(MultiTurnScheduler):
    """Takes a note, then goes on in two ways, one after the other, each of which takes a note."""

    forks = True

    async def run(self, episode: Any) -> StopReason:
        await episode.prepare()
        turn = await episode.generate()
        episode.record(turn, await episode.call_tools(turn))
        for fork in (episode.fork(), episode.fork()):
            await self.run_forks([fork])
        return StopReason.STOP


def says(request: Any) -> str:
    """Take a note that names the fork and the turn."""
    conversation, _, turn = request.request_id.rpartition("/")
    return NOTE % f"{conversation.partition('#')[2] or 'root'}.{turn}" if int(turn) < 2 else "done"


async def test_forks_see_the_calls_of_one_another() -> None:
    tool = Notes()
    context = scripted_context(says, tools=[tool], scheduler=Forks())
    found = await run_episode(context, task(tools=("note",)), id="e")
    assert found.error is None, found.error
    shown = [str(turn.tool_results[0].content) for turn in found.turns if turn.tool_results]
    assert shown == ["root.0", "root.0 1.1", "root.0 1.1 2.1"]
    assert tool.notes == {}


@pytest.mark.parametrize(("tool", "is_named"), [(Notes(), True), (Stateless(), False)])
def test_run_names_tools_whose_state_forks_share(tool: Notes, is_named: bool, caplog: pytest.LogCaptureFixture) -> None:
    summary = type("Summary", (), {"num_tasks": 1, "interactions": {}, "num_with_tools": 1, "unknown_tools": {}})
    with caplog.at_level(logging.WARNING):
        check_use(scripted_context(["x"], tools=[tool], scheduler=Forks()), {"train": summary})  # type: ignore[dict-item]
    assert ("'note'" in caplog.text) is is_named
