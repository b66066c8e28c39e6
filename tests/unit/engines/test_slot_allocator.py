"""Which requests get a slot, and what that costs."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np

from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.engines.slot_allocator import SlotAllocator
from polyturn.engines.slots import EngineStats, SlotRequest, Slots


class CountingSlots(Slots):
    """Slots that count how often a prompt is compared with them."""

    num_comparisons = 0

    def donor(self, prompt: Any) -> tuple[int, int, int]:
        self.num_comparisons += 1
        return super().donor(prompt)


async def test_full_engine_compares_no_prompts() -> None:
    slots = CountingSlots.make(2, 64)
    allocator = SlotAllocator(slots, max_context=64, share_prefixes=True, stats=EngineStats())

    def request(number: int) -> SlotRequest:
        asked = GenerateRequest(
            request_id=f"{number}",
            session_id=f"{number}",
            prompt_ids=np.full(16, number, np.int32),
            sampling=SamplingParams(max_tokens=4),
        )
        return SlotRequest(asked, asyncio.get_running_loop().create_future(), random.Random(0), [(0, 0)])

    waiting, _ = allocator.admit([request(number) for number in range(100)])
    assert (len(waiting), slots.num_comparisons) == (98, 2)
    assert allocator.admit(waiting) == (waiting, [])
    assert slots.num_comparisons == 2
    first = slots.running[0]
    assert first is not None
    allocator.leave(first)
    waiting, _ = allocator.admit(waiting)
    assert (len(waiting), slots.num_comparisons) == (97, 3)
