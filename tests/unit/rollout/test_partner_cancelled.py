"""An interaction that was started is finalized under its own id, in whatever moment the episode is cancelled."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from polyturn.interactions.base import BaseInteraction
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task


class Counting(BaseInteraction):
    """Counts the conversations that it holds, by the id that it chose."""

    def __init__(self) -> None:
        super().__init__({})
        self.held: Counter[str] = Counter()
        self.ended: list[str] = []

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        self.held[f"own-{instance_id}"] += 1
        return f"own-{instance_id}"

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        return False, "again", 0.0, {}

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
        self.ended.append(instance_id)
        self.held[instance_id] -= 1


async def test_a_cancellation_in_any_moment_finalizes_what_was_started():
    ended = set()
    for passes in range(40):
        partner = Counting()
        context = scripted_context(["A.", "B."], interactions={"partner": partner})
        running = asyncio.ensure_future(run_episode(context, task(interaction="partner"), id="e"))
        for _ in range(passes):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait({running})
        assert not +partner.held, passes
        assert len(partner.ended) <= 1
        ended.update(partner.ended)
    assert ended == {"own-e"}
