"""A conversation in flight goes on behind its last complete turn in another process, and no call is made twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import polyturn
from polyturn.core.env import envs
from polyturn.core.generation import GenerateRequest
from polyturn.core.messages import Message
from polyturn.core.trajectory import Trajectory
from polyturn.interactions.base import BaseInteraction
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.rollout.journal_codec import JournalCodec
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.rollout.schedulers import Gym
from polyturn.rollout.schedulers.compaction import Compaction
from polyturn.rollout.schedulers.react import React
from polyturn.testing.episodes import scripted_context, task
from polyturn.tools.base import BaseTool
from polyturn.tools.gsm8k import Gsm8kTool
from polyturn.training.journal_file import JournalFile

CHECK = '<tool_call>\n{"name": "calc_gsm8k_reward", "arguments": {"answer": "5"}}\n</tool_call>'
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'


class Killed(BaseException):
    """What stands for kill -9 in these tests: nothing that the library catches."""


async def lives(
    folder: Path, says: list[str], *, die_at: int | None = None, **options: Any
) -> tuple[Trajectory | None, Any]:
    """Run one life of the episode g1/0; it dies when the model is asked for turn `die_at`. Return what came of it."""
    journal = JournalFile(folder)
    if is_there(folder):
        journal.resume(0, oldest=lambda ticket: 0)
    else:
        journal.begin(0)
    asked: list[int] = []

    def answer(request: GenerateRequest) -> str:
        turn = int(request.request_id.rpartition("/")[2])
        if turn == die_at:
            raise Killed
        asked.append(turn)
        return says[turn]

    given = options.pop("task", None) or task(interaction="partner" if "interactions" in options else None)
    context = scripted_context(answer, journal=journal, **options)
    try:
        return await run_episode(context, given, id="g1/0", seed=1), (asked, journal.read_metrics())
    except Killed:
        return None, (asked, journal.read_metrics())
    finally:
        journal.close()


def is_there(folder: Path) -> bool:
    return any(folder.glob("*"))


def counted(resumed: int = 0, restarted: int = 0, failed: int = 0) -> dict[str, float]:
    return {
        "rollout/resumed_episodes": resumed,
        "rollout/restarted_episodes": restarted,
        "rollout/failed_snapshots": failed,
    }


async def check_like_whole(folder: Path, says: list[str], options: Callable[[], dict[str, Any]]) -> Trajectory:
    """Check that an episode which dies before every turn but the first leaves the trajectory of one that never did."""
    whole, _ = await lives(folder / "whole", says, **options())
    assert whole is not None
    for turn in range(1, len(whole.turns)):
        broken, _ = await lives(folder / "parts", says, die_at=turn, **options())
        assert broken is None
    parts, (asked, counts) = await lives(folder / "parts", says, **options())
    assert parts is not None and asked == [len(whole.turns) - 1], "only the last turn was left to do"
    assert counts == counted(resumed=1)
    same = (
        [s.same_as(o) for s, o in zip(whole.segments, parts.segments, strict=True)],
        [t.message == o.message for t, o in zip(whole.turns, parts.turns, strict=True)],
        [t.observation == o.observation for t, o in zip(whole.turns, parts.turns, strict=True)],
        [t.scores == o.scores for t, o in zip(whole.turns, parts.turns, strict=True)],
        [t.spans == o.spans for t, o in zip(whole.turns, parts.turns, strict=True)],
    )
    assert all(all(part) for part in same), same
    assert parts.reward == whole.reward and parts.stop_reason is whole.stop_reason
    again, (asked, counts) = await lives(folder / "parts", says, **options())
    assert again is not None and asked == [] and counts == counted(resumed=1), "what was over is not run again"
    assert all(s.same_as(o) for s, o in zip(whole.segments, again.segments, strict=True)) and again.reward == whole.reward
    return parts


async def test_tools_and_interactions_take_up_their_state(tmp_path: Path):
    """The tool's step reward depends on its answers before, the interaction's on the right answer."""
    given = task(interaction="partner", tools_kwargs={})
    says = [CHECK, "#### 5", CHECK, "#### 4"]
    found = await check_like_whole(
        tmp_path,
        says,
        lambda: {
            "tools": [Gsm8kTool({})],
            "interactions": {"partner": Gsm8kInteraction({"name": "partner"})},
            "task": given,
        },
    )
    assert [turn.scores for turn in found.turns][1] == {"interaction": 0.0}


@pytest.mark.parametrize(
    ("says", "scheduler"),
    [
        (["Action: add\nAction Input: {}", "Action: add\nAction Input: {}", "#### 4"], lambda: React()),
        (["one", "two", "three", "#### 4"], lambda: Rewrites()),
        (["one two three", "x", "#### 4"], lambda: Weighs()),
    ],
)
async def test_every_way_to_edit_a_history_is_kept(tmp_path: Path, says: list[str], scheduler: Any):
    await check_like_whole(tmp_path, says, lambda: {"tools": [add], "scheduler": scheduler()})


async def test_reasoning_and_compaction_are_kept(tmp_path: Path):
    says = [f"<think>hm {i}</think>\n{ADD}" for i in range(3)] + ["#### 4"]
    await check_like_whole(
        tmp_path, says, lambda: {"tools": [add], "scheduler": Compaction(budget=400, policies=("drop_reasoning", "window"))}
    )


async def test_a_history_that_is_rendered_every_turn_is_kept(tmp_path: Path):
    says = [f"<think>hm</think>\n{ADD}", ADD, "#### 4"]
    await check_like_whole(tmp_path, says, lambda: {"tools": [add], "renders_history": True})


async def test_a_schedulers_state_is_kept(tmp_path: Path):
    found = await check_like_whole(tmp_path, ["a", "b", "c", "#### 4"], lambda: {"scheduler": Counts()})
    assert [m.text for t in found.turns[:3] for m in t.observation] == ["turn 1", "turn 2", "turn 3"]


class Ladder:
    """An environment that says how high the model has climbed."""

    def __init__(self) -> None:
        self.height = 0

    def reset(self, *, seed: int) -> str:
        return "Climb."

    def step(self, action: str) -> Any:
        self.height += 1
        return f"{self.height} high", 0.5, self.height == 4, {}

    def close(self) -> None:
        pass


class KeptLadder(Ladder):
    def snapshot(self) -> int:
        return self.height

    async def restore(self, state: int) -> None:
        self.height = state


async def test_an_environment_takes_up_its_state(tmp_path: Path):
    envs.register("kept_ladder")(KeptLadder)
    found = await check_like_whole(
        tmp_path, ["a", "b", "c", "d"], lambda: {"scheduler": Gym(env="kept_ladder"), "task": task(data_source=None)}
    )
    assert [turn.scores for turn in found.turns] == [{"env": 0.5}] * 4


@pytest.mark.parametrize("die_at", [2, None])
async def test_what_an_earlier_version_of_the_library_kept_starts_from_its_task(
    die_at: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    says = [ADD, ADD, "#### 4"]
    with monkeypatch.context() as earlier:
        earlier.setattr("polyturn.rollout.journal.FORMAT", 1)
        await lives(tmp_path, says, die_at=die_at, tools=[add])
    whole, (asked, counts) = await lives(tmp_path, says, tools=[add])
    assert whole is not None and asked == [0, 1, 2] and counts == counted(restarted=1)


async def test_a_history_that_is_not_kept_collects_no_events(tmp_path: Path):
    """Else a long conversation whose plug-ins offer no snapshot would hold every edit of its history until its end."""
    held: list[Any] = []

    class Looks(MultiTurnScheduler):
        async def step(self, episode: Any, turn: Any) -> str | None:
            held.append(episode.history.events)
            return None if "####" in turn.text else "go on"

    await lives(tmp_path, ["a", "b", "#### 4"], scheduler=Looks())
    assert held[0] is not None and held[1:] == [None, None]


async def test_one_that_cannot_restarts_by_name_and_is_not_counted_as_failed(tmp_path: Path):
    envs.register("ladder")(Ladder)
    options = {"scheduler": Gym(env="ladder"), "task": task(data_source=None)}
    _, (_, counts) = await lives(tmp_path, ["a", "b", "c", "d"], die_at=2, **dict(options))
    assert counts == counted()
    whole, (asked, counts) = await lives(tmp_path, ["a", "b", "c", "d"], **dict(options))
    assert whole is not None and asked == [0, 1, 2, 3] and counts == counted(restarted=1)


def test_an_image_is_written_once():
    image = "data:image/png;base64," + "A" * 5000
    book, other = JournalCodec(), JournalCodec()
    message = Message(role="user", content=({"type": "image", "image": image},))
    written = book.encode({"messages": [message, message], "media": list(message.media)})
    new = book.take_new()
    assert sum("A" * 5000 in str(record) for record in new) == 1
    other.read(new)
    read = other.decode(written)
    assert read["messages"][0] is read["messages"][1] and read["messages"][0] == message
    assert tuple(read["media"]) == message.media


async def test_a_plug_in_without_a_snapshot_restarts_its_conversations_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    calls: list[str] = []

    class Notes(BaseTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            calls.append(instance_id)
            return "noted"

    def options() -> dict[str, Any]:
        schema = {"type": "function", "function": {"name": "add", "description": "x", "parameters": {"type": "object"}}}
        return {"tools": [Notes({}, schema)]}

    await lives(tmp_path, [ADD, "#### 4"], die_at=1, **options())
    with caplog.at_level("INFO"):
        whole, (asked, counts) = await lives(tmp_path, [ADD, "#### 4"], **options())
    assert whole is not None and asked == [0, 1] and counts == counted(restarted=1)
    assert "1 start from their tasks (1 times: tool 'add' offers no snapshot and is not declared stateless)" in caplog.text
    _, (asked, counts) = await lives(tmp_path, [ADD, "#### 4"], **options())
    assert asked == [] and counts == counted(resumed=1), "one that is over needs no state"


@pytest.mark.parametrize("where", ["snapshot", "restore", "json"])
async def test_a_snapshot_that_fails_is_counted_and_its_conversation_restarts(tmp_path: Path, where: str):
    class Breaks(BaseInteraction):
        async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
            return len(messages) > 3, "Go on.", 0.5, {}

        async def snapshot(self, instance_id: str) -> Any:
            if where == "snapshot":
                raise KeyError("mine")
            return object() if where == "json" else 1

        async def restore(self, instance_id: str, state: Any) -> None:
            raise KeyError("mine")

    def options() -> dict[str, Any]:
        return {"interactions": {"partner": Breaks({"name": "partner"})}}

    _, (_, counts) = await lives(tmp_path, ["a", "b"], die_at=1, **options())
    assert counts == counted(failed=0 if where == "restore" else 1)
    whole, (asked, counts) = await lives(tmp_path, ["a", "b"], **options())
    assert whole is not None and asked == [0, 1]
    assert counts["rollout/restarted_episodes"] == 1 and counts["rollout/resumed_episodes"] == 0


async def test_a_conversation_whose_task_changed_restarts(tmp_path: Path):
    await lives(tmp_path, [ADD, "#### 4"], die_at=1, tools=[add])
    _, (asked, counts) = await lives(tmp_path, [ADD, "#### 4"], tools=[add], task=task("What is 2+3?"))
    assert asked == [0, 1] and counts == counted(restarted=1)


async def test_the_time_before_counts_for_the_time_limit(tmp_path: Path):
    class Slow(MultiTurnScheduler):
        stateless = True

        async def step(self, episode: Any, turn: Any) -> str:
            spent_s = episode.elapsed_s + 3000
            episode.resources.spent(elapsed_s=spent_s, duration_s=spent_s)
            await asyncio.sleep(0)
            return "go on"

    options: dict[str, Any] = {"scheduler": Slow(), "limits": Limits(timeout_s=5000)}
    await lives(tmp_path, ["a", "b", "c"], die_at=1, **options)
    ended, _ = await lives(tmp_path, ["a", "b", "c"], **options)
    assert ended is not None and ended.stop_reason.value == "timeout" and len(ended.turns) == 2


@polyturn.tool
async def add(a: int = 0, b: int = 0) -> str:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return str(a + b)


class Counts(MultiTurnScheduler):
    count = 0

    async def step(self, episode: Any, turn: Any) -> str | None:
        self.count += 1
        return None if "####" in turn.text else f"turn {self.count}"

    async def snapshot(self, episode: Any) -> int:
        return self.count

    def restore(self, episode: Any, state: int) -> None:
        self.count = state


class Rewrites(MultiTurnScheduler):
    stateless = True

    async def step(self, episode: Any, turn: Any) -> Any:
        if "####" in turn.text:
            return None
        episode.rewrite([*episode.prompt, turn.message])
        turn.info["seen"] = len(episode.messages)
        return "Once more."


class Weighs(MultiTurnScheduler):
    stateless = True

    async def step(self, episode: Any, turn: Any) -> Any:
        episode.weigh(turn, 0.5)
        turn.scores["mine"] = float(turn.index)
        if "####" in turn.text:
            return None
        return episode.go_on(" Wait.", keep=turn.text[:1])
