"""A conversation in flight continues after its last complete turn in another process; no call is repeated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.rollout.env import envs
from polyturn.rollout.limits import Limits
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.rollout.schedulers import Gym
from polyturn.rollout.schedulers.compaction import Compaction
from polyturn.testing.episodes import task
from polyturn.tools.base import BaseTool
from polyturn.tools.gsm8k import Gsm8kTool
from support.example_schedulers import React
from support.flights import check_like_whole, counted, lives
from support.parts import Says, Steps, add, call

CHECK = call("calc_gsm8k_reward", answer="5")
ADD = call("add", a=2, b=2)


def rewrite(episode: Any, turn: Any) -> Any:
    if "####" in turn.text:
        return None
    episode.rewrite([*episode.prompt, turn.message])
    turn.info["seen"] = len(episode.messages)
    return "Once more."


def note(episode: Any, turn: Any) -> Any:
    first = episode.turns[0].info
    first.setdefault("tries", []).append(turn.index)
    first.setdefault("by_turn", {})[turn.index] = {"#items": turn.index}
    return None if "####" in turn.text else "Once more."


def weigh(episode: Any, turn: Any) -> Any:
    episode.weigh(turn, 0.5)
    turn.scores["mine"] = float(turn.index)
    return None if "####" in turn.text else episode.go_on(" Wait.", keep=turn.text[:1])


REACT = "Action: add\nAction Input: {}"
THINKS = [f"<think>hm {i}</think>\n{ADD}" for i in range(3)] + ["#### 4"]


@pytest.mark.parametrize(
    ("says", "options"),
    [
        ([REACT, REACT, "#### 4"], lambda: {"scheduler": React()}),
        (["one", "two", "three", "#### 4"], lambda: {"scheduler": Steps(rewrite)}),
        (["one", "two", "three", "#### 4"], lambda: {"scheduler": Steps(note)}),
        (["one two three", "x", "#### 4"], lambda: {"scheduler": Steps(weigh)}),
        (THINKS, lambda: {"scheduler": Compaction(budget=400, policies=("drop_reasoning", "window"))}),
        (THINKS[1:], lambda: {"renders_history": True}),
    ],
    ids=["react", "rewrite", "note", "weigh and go on", "compaction", "rendered history"],
)
async def test_every_way_to_edit_a_history_is_kept(
    tmp_path: Path, says: list[str], options: Callable[[], dict[str, Any]]
) -> None:
    await check_like_whole(tmp_path, says, lambda: {"tools": [add], **options()})


async def test_arrays_in_infos_are_kept_as_lists(tmp_path: Path) -> None:
    def count(episode: Any, turn: Any) -> Any:
        turn.info["scores"] = np.arange(2) + turn.index
        return None if "####" in turn.text else "Once more."

    says = ["one", "two", "#### 4"]
    await lives(tmp_path, says, die_at=2, scheduler=Steps(count))
    resumed, (asked, counts) = await lives(tmp_path, says, scheduler=Steps(count))
    assert resumed is not None and asked == [2] and counts == counted(resumed=1)
    assert [list(turn.info["scores"]) for turn in resumed.turns] == [[0, 1], [1, 2], [2, 3]]


async def test_tools_and_interactions_take_up_their_state(tmp_path: Path) -> None:
    """The tool's step reward depends on its earlier answers, the interaction's on the right answer."""
    found = await check_like_whole(
        tmp_path,
        [CHECK, "#### 5", CHECK, "#### 4"],
        lambda: {
            "tools": [Gsm8kTool({})],
            "interactions": {"partner": Gsm8kInteraction({"name": "partner"})},
            "task": task(interaction="partner", tools_kwargs={}),
        },
    )
    assert found.turns[1].scores == {"interaction": 0.0}


class Counts(MultiTurnScheduler):
    count = 0

    async def step(self, episode: Any, turn: Any) -> str | None:
        self.count += 1
        return None if "####" in turn.text else f"turn {self.count}"

    async def snapshot(self, episode: Any) -> int:
        return self.count

    def restore(self, episode: Any, state: int) -> None:
        self.count = state


async def test_state_of_a_scheduler_is_kept(tmp_path: Path) -> None:
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


envs.register("ladder")(Ladder)
envs.register("kept_ladder")(KeptLadder)


async def test_environment_takes_up_its_state_or_restarts(tmp_path: Path) -> None:
    row = task(data_source=None)
    says = ["a", "b", "c", "d"]
    found = await check_like_whole(tmp_path, says, lambda: {"scheduler": Gym(env="kept_ladder"), "task": row})
    assert [turn.scores for turn in found.turns] == [{"env": 0.5}] * 4
    options = {"scheduler": Gym(env="ladder"), "task": row}
    _, (_, counts) = await lives(tmp_path / "other", says, die_at=2, **dict(options))
    assert counts == counted(), "not counted as failed"
    whole, (asked, counts) = await lives(tmp_path / "other", says, **dict(options))
    assert whole is not None
    assert asked == [0, 1, 2, 3]
    assert counts == counted(restarted=1)


@pytest.mark.parametrize("die_at", [2, None])
async def test_journal_of_another_format_restarts_from_the_task(
    die_at: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = [ADD, ADD, "#### 4"]
    with monkeypatch.context() as earlier:
        earlier.setattr("polyturn.rollout.journal.FORMAT", 1)
        await lives(tmp_path, says, die_at=die_at, tools=[add])
    whole, (asked, counts) = await lives(tmp_path, says, tools=[add])
    assert whole is not None
    assert asked == [0, 1, 2]
    assert counts == counted(restarted=1)


async def test_unkept_history_collects_no_events(tmp_path: Path) -> None:
    """Otherwise a long conversation whose plug-ins offer no snapshot holds every edit of its history until its end."""
    held: list[Any] = []

    class Looks(MultiTurnScheduler):
        async def step(self, episode: Any, turn: Any) -> str | None:
            held.append(episode.history.events)
            return None if "####" in turn.text else "go on"

    await lives(tmp_path, ["a", "b", "#### 4"], scheduler=Looks())
    assert held[0] is not None
    assert held[1:] == [None, None]


async def test_long_text_is_written_once_whatever_names_it(tmp_path: Path) -> None:
    """A model may name its arguments as the journal names its texts."""
    odd = call("add", a=2, b=2, **{"#text": 0, "note": "n" * 200})
    found = await check_like_whole(tmp_path, [odd, odd, "#### 4"], lambda: {"tools": [add]})
    assert found.turns[0].message.tool_calls[0].arguments == {"a": 2, "b": 2, "#text": 0, "note": "n" * 200}
    assert (tmp_path / "parts" / "step-000000.jsonl").read_text().count('"' + "n" * 200 + '"') == 1


class Notes(BaseTool):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return "noted"


async def test_plug_in_without_snapshot_restarts_its_conversations(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    schema = {"type": "function", "function": {"name": "add", "description": "x", "parameters": {"type": "object"}}}
    await lives(tmp_path, [ADD, "#### 4"], die_at=1, tools=[Notes({}, schema)])
    with caplog.at_level("INFO"):
        whole, (asked, counts) = await lives(tmp_path, [ADD, "#### 4"], tools=[Notes({}, schema)])
    assert whole is not None
    assert asked == [0, 1]
    assert counts == counted(restarted=1)
    assert "tool 'add' offers no snapshot" in caplog.text
    _, (asked, counts) = await lives(tmp_path, [ADD, "#### 4"], tools=[Notes({}, schema)])
    assert asked == []
    assert counts == counted(resumed=1), "one that is over needs no state"


class Breaks(Says):
    """An interaction whose snapshot fails in one place."""

    def __init__(self, where: str) -> None:
        super().__init__("Go on.", score=0.5)
        self.where = where

    async def snapshot(self, instance_id: str) -> Any:
        if self.where == "snapshot":
            raise KeyError("mine")
        return object() if self.where == "json" else 1

    async def restore(self, instance_id: str, state: Any) -> None:
        raise KeyError("mine")


@pytest.mark.parametrize("where", ["snapshot", "restore", "json"])
async def test_failing_snapshot_is_counted_and_restarts(tmp_path: Path, where: str) -> None:
    options = {"interactions": {"partner": Breaks(where)}, "limits": Limits(max_turns=2)}
    _, (_, counts) = await lives(tmp_path, ["a", "b"], die_at=1, **dict(options))
    assert counts == counted(failed=where != "restore")
    whole, (asked, counts) = await lives(tmp_path, ["a", "b"], **dict(options))
    assert whole is not None
    assert asked == [0, 1]
    assert (counts["rollout/restarted_episodes"], counts["rollout/resumed_episodes"]) == (1, 0)


async def test_changed_task_restarts_its_conversation(tmp_path: Path) -> None:
    await lives(tmp_path, [ADD, "#### 4"], die_at=1, tools=[add])
    _, (asked, counts) = await lives(tmp_path, [ADD, "#### 4"], tools=[add], task=task("What is 2+3?"))
    assert asked == [0, 1]
    assert counts == counted(restarted=1)


async def test_time_of_an_earlier_life_counts_for_the_limit(tmp_path: Path) -> None:
    def spend(episode: Any, turn: Any) -> str:
        spent_s = episode.elapsed_s + 3000
        episode.resources.spent(elapsed_s=spent_s, duration_s=spent_s)
        return "go on"

    options: dict[str, Any] = {"scheduler": Steps(spend), "limits": Limits(timeout_s=5000)}
    await lives(tmp_path, ["a", "b", "c"], die_at=1, **options)
    ended, _ = await lives(tmp_path, ["a", "b", "c"], **options)
    assert ended.stop_reason.value == "timeout"
    assert len(ended.turns) == 2
