"""Many groups at once: bounded, in order, cancelled cleanly, and ended by name when most of them fail."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref
from typing import Any

import pytest

from polyturn.core.errors import RolloutError
from polyturn.core.generation import GenerateRequest
from polyturn.rollout.episode import Episode
from polyturn.rollout.limits import Limits
from polyturn.rollout.pool import FailureBudget, GroupSpec, RolloutPool
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.codec import Codec
from polyturn.tools.gsm8k import Gsm8kTool
from support.parts import Says, call, virtual
from support.refusals import refuses


def specs(num: int, size: int = 1, **fields: Any) -> list[GroupSpec]:
    return [GroupSpec(id=f"g{i}", task=task(id=f"t{i}", **fields), size=size, seed=i) for i in range(num)]


class Room(Says):
    """Counts the episodes inside."""

    def __init__(self, hold_s: float) -> None:
        super().__init__("", is_done=True, score=1.0)
        self.inside = self.most = self.ended = 0
        self.hold_s = hold_s

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        self.inside += 1
        self.most = max(self.most, self.inside)
        return str(instance_id)

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(self.hold_s)
        return self.answer

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
        self.inside -= 1
        self.ended += 1


async def test_pool_bounds_live_episodes_and_keeps_the_order() -> None:
    room = Room(0.001)
    seen: list[str] = []
    context = scripted_context(["hi"], interactions={"room": room})
    pool = RolloutPool(context, max_concurrent=3, on_group=lambda g: seen.append(g.id))
    groups = await pool.run(specs(6, size=2, interaction="room", data_source=None))
    assert [g.id for g in groups] == sorted(seen) == [f"g{i}" for i in range(6)]
    assert [t.id for t in groups[1].trajectories] == ["g1/0", "g1/1"]
    assert (room.most, room.inside, room.ended) == (3, 0, 12)


@virtual
async def test_cancelled_pool_releases_everything_that_was_started() -> None:
    room = Room(30)
    context = scripted_context(["hi"], interactions={"room": room})
    running = asyncio.create_task(RolloutPool(context, max_concurrent=4).run(specs(9, interaction="room", data_source=None)))
    await asyncio.sleep(1)
    assert room.inside == 4
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (room.inside, room.ended, context.num_live_interactions) == (0, 4, 0)


async def test_seeds_do_not_depend_on_the_order_of_groups() -> None:
    async def seeds_of(order: list[int]) -> dict[str, int | None]:
        found: dict[str, int | None] = {}

        def says(request: GenerateRequest) -> str:
            found[request.request_id] = request.sampling.seed
            return "x"

        await RolloutPool(scripted_context(says)).run([specs(4, size=2)[i] for i in order])
        return found

    found = await seeds_of([0, 1, 2, 3])
    assert found == await seeds_of([3, 1, 0, 2])
    assert len(set(found.values())) == 8


async def test_pool_ends_with_the_reasons_if_too_many_fail() -> None:
    def says(request: GenerateRequest) -> Any:
        return OSError("gone") if int(request.session_id[1:].split("/")[0]) % 2 else "x"

    with pytest.raises(RolloutError, match=r"0\.25") as caught:
        await RolloutPool(scripted_context(says), max_failed_share=0.25).run(specs(40))
    assert "times: EngineError: " in str(caught.value)

    def says_once(request: GenerateRequest) -> Any:
        return OSError("gone") if request.session_id == "g3/0" else "x"

    groups = await RolloutPool(scripted_context(says_once), max_failed_share=0.1).run(specs(20))
    assert [t.is_failed for g in groups for t in g.trajectories].count(True) == 1, "a few failures are data"


async def test_failure_budget_counts_the_latest_trajectories(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long good time, an engine that breaks ends the run as soon as it would have at the start."""
    good, bad = [
        await RolloutPool(scripted_context([say]), max_failed_share=1).run_one(specs(1)[0]) for say in ("x", OSError("gone"))
    ]
    monkeypatch.setattr(FailureBudget, "WINDOW", 100)
    budget = FailureBudget(max_share=0.1)
    for group in [good] * 1000 + [bad] * 10:
        budget.count(group)
    refuses(lambda: budget.count(bad), RolloutError, "11 of the latest 100")
    first = FailureBudget(max_share=0.1)
    for group in [good] * 4 + [bad] * 6:  # failures end first, and 6 of a step of 64 are allowed
        first.count(group)
    refuses(lambda: first.count(bad), RolloutError, "7 of the latest 11")


async def test_groups_with_a_turn_limit_share_the_context() -> None:
    context = scripted_context(["a"], sanity_every=3)
    groups = [dataclasses.replace(spec, max_turns=1) for spec in specs(4, data_source=None)]
    trajectories = [group.trajectories[0] for group in await RolloutPool(context, max_concurrent=1).run(groups)]
    assert [len(t.turns) for t in trajectories] == [1] * 4
    assert sum(t.metrics.get("sanity_checked", 0) for t in trajectories) == 2, "the first and the fourth"


def test_copy_of_a_context_encodes_with_its_own_codec() -> None:
    context = scripted_context(["a"])
    assert context.encoder_for(task()).codec is context.codec
    copy = dataclasses.replace(context, codec=Codec(tiny_tokenizer()))
    assert copy.encoder_for(task()).codec is copy.codec is not context.codec
    assert copy.running is context.running and copy.reported is context.reported


@pytest.mark.parametrize("said", ["#### 3", call("calc_gsm8k_reward", answer="8")])
async def test_ended_episode_is_freed_without_the_garbage_collector(said: str) -> None:
    """Otherwise episodes with their tokens would fill the memory until the next full collection."""
    context = scripted_context([said] * 3, tools=[Gsm8kTool({})], limits=Limits(max_turns=3))
    gc.collect()
    gc.disable()
    try:
        seen: list[weakref.ref[Episode]] = []
        for number in range(2):
            one = task(id=f"t{number}")
            await run_episode(context, one, id=f"e{number}", on_start=lambda episode: seen.append(weakref.ref(episode)))
        await asyncio.sleep(0)
        assert [ref() for ref in seen] == [None, None]
    finally:
        gc.enable()
