"""Many groups at once: bounded, in order, cancelled cleanly, and ended by name when most of them fail."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from polyturn.core.errors import RolloutError
from polyturn.core.generation import GenerateRequest
from polyturn.interactions.base import BaseInteraction
from polyturn.rollout.episode import Episode
from polyturn.rollout.limits import Limits
from polyturn.rollout.pool import FailureBudget, GroupSpec, RolloutPool
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task
from polyturn.tools.gsm8k import Gsm8kTool


def specs(num: int, size: int = 1, **fields: Any) -> list[GroupSpec]:
    return [GroupSpec(id=f"g{i}", task=task(id=f"t{i}", **fields), size=size, seed=i) for i in range(num)]


class Room(BaseInteraction):
    """Counts who is inside."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.inside = self.most = self.ended = 0
        self.hold_s = config.get("hold_s", 0.001)

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        self.inside += 1
        self.most = max(self.most, self.inside)
        return str(instance_id)

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(self.hold_s)
        return True, "", 1.0, {}

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
        self.inside -= 1
        self.ended += 1


async def test_never_more_live_episodes_than_allowed_and_results_in_order():
    room = Room({})
    seen: list[str] = []
    context = scripted_context(["hi"], interactions={"room": room})
    pool = RolloutPool(context, max_concurrent=3, on_group=lambda g: seen.append(g.id))
    groups = await pool.run(specs(6, size=2, interaction="room", data_source=None))
    assert [g.id for g in groups] == [f"g{i}" for i in range(6)] and sorted(seen) == [g.id for g in groups]
    assert [t.id for t in groups[1].trajectories] == ["g1/0", "g1/1"]
    assert room.most == 3 and room.inside == 0 and room.ended == 12


async def test_cancelling_a_run_releases_everything_that_was_started():
    room = Room({"hold_s": 60})
    context = scripted_context(["hi"], interactions={"room": room})
    running = asyncio.create_task(RolloutPool(context, max_concurrent=4).run(specs(9, interaction="room", data_source=None)))
    await asyncio.sleep(0.05)
    assert room.inside == 4
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert room.inside == 0 and room.ended == 4 and context.num_live_interactions == 0


async def test_the_seeds_of_a_group_follow_from_its_seed_its_task_and_the_member_alone():
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


async def test_a_run_in_which_too_many_fail_ends_with_the_reasons():
    def says(request: GenerateRequest) -> Any:
        return OSError("the server is gone") if int(request.session_id[1:].split("/")[0]) % 2 else "x"

    pool = RolloutPool(scripted_context(says), max_failed_share=0.25)
    with pytest.raises(RolloutError, match=r"\d+ times: EngineError: .*the server is gone") as raised:
        await pool.run(specs(40))
    assert "trajectories failed, more than rollout.max_failed_share = 0.25 allows" in str(raised.value)


async def test_a_few_failures_are_data():
    def says(request: GenerateRequest) -> Any:
        return OSError("gone") if request.session_id == "g3/0" else "x"

    groups = await RolloutPool(scripted_context(says), max_failed_share=0.1).run(specs(20))
    assert [t.is_failed for g in groups for t in g.trajectories].count(True) == 1


async def test_only_the_latest_trajectories_count(monkeypatch: pytest.MonkeyPatch):
    """After a long good time, an engine that breaks ends the run as soon as it would have at the start."""
    good, bad = [
        await RolloutPool(scripted_context([say]), max_failed_share=1).run_one(specs(1)[0]) for say in ("x", OSError("gone"))
    ]
    monkeypatch.setattr(FailureBudget, "WINDOW", 50)
    budget = FailureBudget(max_share=0.1)
    for _ in range(1000):
        budget.count(good)
    for _ in range(5):
        budget.count(bad)
    with pytest.raises(RolloutError, match="6 of the latest 50"):
        budget.count(bad)


@pytest.mark.parametrize(
    "said", ["#### 3", '<tool_call>\n{"name": "calc_gsm8k_reward", "arguments": {"answer": "8"}}\n</tool_call>']
)
async def test_an_episode_that_has_ended_is_freed_at_once_and_not_by_the_garbage_collector(said: str):
    """Else every episode stays in memory, tokens and all, until a full collection, which grows with what else is there."""
    context = scripted_context([said] * 3, tools=[Gsm8kTool({})], limits=Limits(max_turns=3))
    gc.collect()
    gc.disable()
    try:
        seen: list[weakref.ref[Episode]] = []
        for number in range(2):
            await run_episode(
                context, task(id=f"t{number}"), id=f"e{number}", on_start=lambda episode: seen.append(weakref.ref(episode))
            )
        await asyncio.sleep(0)
        assert [ref() for ref in seen] == [None, None]
    finally:
        gc.enable()
