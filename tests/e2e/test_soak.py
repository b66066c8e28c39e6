"""Twenty thousand episodes with errors, time-outs and cancellations mixed in: nothing leaks, nothing hangs. Long form."""

from __future__ import annotations

import asyncio
import gc
import random
import resource
from typing import Any

import pytest

import polyturn
from polyturn.interactions.base import BaseInteraction
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task

CALL = '<tool_call>\n{"name": "flaky", "arguments": {"n": 1}}\n</tool_call>'


class Flaky(BaseInteraction):
    """Raises, hangs or answers, and counts who is still there."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.live: set[str] = set()
        self.random = random.Random(0)

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        assert instance_id is not None
        self.live.add(instance_id)
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        chance = self.random.random()
        if chance < 0.05:
            raise RuntimeError("broken")
        if chance < 0.1:
            await asyncio.sleep(10)
        return chance > 0.6, "again", chance, {}

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
        self.live.remove(instance_id)


@polyturn.tool
async def flaky(n: int) -> str:
    """Fail now and then.

    Args:
        n: Any number.
    """
    chance = random.random()
    if chance < 0.1:
        raise ValueError("no")
    if chance < 0.12:
        await asyncio.sleep(10)
    return "fine"


def resident_mib() -> float:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


@pytest.mark.chance
@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_twenty_thousand_episodes_leave_nothing_behind():
    user = Flaky({"name": "user"})
    rng = random.Random(1)
    context = scripted_context(
        lambda request: CALL if rng.random() < 0.3 else "#### 4",
        tools=[flaky],
        interactions={"user": user},
        limits=Limits(max_turns=4),
        interaction_timeout_s=0.01,
        tool_timeout_s=0.01,
        sanity_every=0,
    )
    one = task(interaction="user", data_source=None)
    before = 0.0
    for batch in range(40):
        episodes = [asyncio.create_task(run_episode(context, one, id=f"b{batch}/{i}", seed=i)) for i in range(500)]
        await asyncio.sleep(0)
        for episode in rng.sample(episodes, 25):
            episode.cancel()
        done = await asyncio.wait_for(asyncio.gather(*episodes, return_exceptions=True), timeout=60)
        assert sum(isinstance(d, asyncio.CancelledError) for d in done) <= 25
        assert not [d for d in done if isinstance(d, Exception)], "every failure is a trajectory's, none is raised"
        if batch == 9:
            before = resident_mib()
    assert user.live == set()
    assert context.num_live_interactions == 0
    assert context.tools.live_ids == set()
    assert len(asyncio.all_tasks()) == 1
    assert resident_mib() - before < 15, "15,000 episodes later"
