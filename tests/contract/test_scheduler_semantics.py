"""What holds for every scheduler: the shipped ones, the examples, and one of each kind that an author may write."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polyturn.core.lifecycle import StopReason
from polyturn.core.trajectory import SpanSource
from polyturn.rollout.env import envs
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler, Reply
from polyturn.rollout.schedulers import Compaction, Gym, SingleTurn
from polyturn.testing.episodes import scripted_context, task, turn_ids
from support.clock import skip_an_hour_once
from support.example_schedulers import ImageTools, MathTips, React, ThinkingTips, Tree
from support.invariants import check_invariants


@envs.register("semantics_room")
class Room:
    """Says something for ever."""

    def reset(self, *, seed: int) -> str:
        return "You are in a room."

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return "Still the room.", 0.0, False, {}

    def close(self) -> None: ...


class Plain(MultiTurnScheduler):
    def step(self, episode: Any, turn: Any) -> str:
        return "more"


class Drives(MultiTurnScheduler):
    """A loop of its own."""

    async def run(self, episode: Any) -> StopReason:
        while (limit := await episode.prepare()) is None:
            turn = await episode.generate()
            if turn.finish_reason.value == "length":
                return turn.cut_by
            episode.record(turn, Reply.of("more"))
        return limit


SCHEDULERS: dict[str, Callable[[], MultiTurnScheduler]] = {
    "default": MultiTurnScheduler,
    "single_turn": SingleTurn,
    "math_tips": MathTips,
    "thinking_tips": ThinkingTips,
    "react": React,
    "gym": lambda: Gym(env="semantics_room"),
    "image_tools": ImageTools,
    "compaction": lambda: Compaction(budget=40),
    "plain": Plain,
    "own run": Drives,
    "tree": lambda: Tree(width=2),
}
SAYS = ["<think>a</think>b<answer>1</answer>", "Action: x\nAction Input: 1", "c"]


def context(name: str, says: Any = SAYS, **options: Any) -> Any:
    return scripted_context(says, scheduler=SCHEDULERS[name](), rewards=REWARDS, **options)


REWARDS = {"mine": lambda trajectory: 1.0}
ROW = task(ground_truth="42", data_source="mine")


@pytest.mark.parametrize("name", SCHEDULERS)
async def test_sampled_ids_are_kept_in_every_turn(name: str) -> None:
    t = await run_episode(context(name, limits=Limits(max_turns=3)), ROW, id="e")
    assert not t.is_failed and t.turns, t.error
    for turn in t.turns:
        spans = [t.span(ref) for ref in turn.spans]
        ids = np.concatenate([s.ids for s in spans if s.source is SpanSource.SAMPLED])
        assert any(np.array_equal(ids, turn_ids(said)[: len(ids)]) for said in SAYS)
    cut = t.metrics.get("dropped_cut", 0)
    assert t.num_sampled_tokens + cut == t.metrics["sampled_tokens"]
    check_invariants(t)


@pytest.mark.parametrize("name", sorted(set(SCHEDULERS) - {"tree"}))
async def test_cut_completion_ends_the_episode(name: str) -> None:
    t = await run_episode(context(name, limits=Limits(max_tokens_per_turn=2)), ROW, id="e")
    assert t.stop_reason is StopReason.LENGTH and len(t.turns) == 1


async def test_check_finished_can_continue_a_cut_completion() -> None:
    class Patient(Plain):
        def check_finished(self, episode: Any, turn: Any) -> None:
            return None

    made = scripted_context(SAYS, scheduler=Patient(), rewards=REWARDS, limits=Limits(max_tokens_per_turn=2, max_turns=3))
    t = await run_episode(made, ROW, id="e")
    assert t.stop_reason is StopReason.MAX_TURNS and len(t.turns) == 3


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize(
    "limits", [Limits(max_tokens=12, max_turns=None), Limits(max_turns=2), Limits(timeout_s=60.0, max_turns=None)]
)
async def test_every_limit_ends_every_scheduler(name: str, limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of time passes while the second turn is sampled."""
    asked: list[Any] = []

    def say(request: Any) -> str:
        asked.append(request)
        return SAYS[len(asked) % 3]

    latency = {}
    if limits.timeout_s is not None:
        skip_an_hour_once(lambda: len(asked) > 1, monkeypatch)
        latency = {"latency_s": 0.01}
    t = await run_episode(context(name, say, limits=limits, **latency), ROW, id="e")
    assert not t.is_failed, t.error
    if limits.max_tokens is not None and name != "tree":
        assert t.metrics["sampled_tokens"] - t.metrics.get("dropped_cut", 0) <= 12


@pytest.mark.parametrize("name", SCHEDULERS)
async def test_failing_trajectory_leaves_the_others(name: str) -> None:
    def say(request: Any) -> Any:
        return OSError("lost") if request.session_id.startswith("bad") else "x"

    made = context(name, say, limits=Limits(max_turns=2))
    ids = ["good/0", "bad/0", "good/1"]
    found = await asyncio.gather(*(run_episode(made, ROW, id=i) for i in ids))
    assert [t.is_failed for t in found] == [False, True, False]
    assert "lost" in (found[1].error or "") and found[1].reward is None


async def test_run_that_ignores_its_limits_is_stopped() -> None:
    class Endless(MultiTurnScheduler):
        async def run(self, episode: Any) -> StopReason:
            while True:
                await episode.prepare()
                episode.record(await episode.generate(), Reply.of("more"))

    t = await run_episode(scripted_context(SAYS, scheduler=Endless(), limits=Limits(max_turns=3)), ROW, id="g7/2")
    assert t.is_failed and len(t.turns) == 3
    assert "episode 'g7/2': another turn was asked for at 3 turns" in (t.error or "")


async def test_512_plain_steps_run_side_by_side() -> None:
    """No step returns before all have begun, so fewer threads than episodes would leave them waiting for ever."""
    everybody = threading.Barrier(512)

    class Meets(MultiTurnScheduler):
        def step(self, episode: Any, turn: Any) -> str:
            assert threading.current_thread() is not threading.main_thread()
            everybody.wait(timeout=120)
            return "more"

    made = scripted_context(
        ["x"], scheduler=Meets(), rewards=REWARDS, limits=Limits(max_turns=2), sanity_every=0, scheduler_timeout_s=200.0
    )
    found = await asyncio.gather(*(run_episode(made, ROW, id=f"e{i}") for i in range(512)))
    assert all(len(t.turns) == 2 and not t.is_failed for t in found)
