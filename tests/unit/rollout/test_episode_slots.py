"""EpisodeSlots: a fixed number of episodes in flight, and one that follows the load of a scripted engine."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from polyturn.core.protocols import EngineLoad
from polyturn.rollout.slots import EpisodeSlots
from support.virtual_time import run_virtual


class Loaded:
    """An engine whose load the test sets."""

    def __init__(self, queue: float = 0.0, kv_use: float = 0.0) -> None:
        self.load: EngineLoad | None = EngineLoad(queue, kv_use)


def slots_of(engine: Any, *, least: int = 4, most: int = 64) -> EpisodeSlots:
    return EpisodeSlots(most=most, least=least, engine=engine)


async def hold(slots: EpisodeSlots, number: int) -> list[asyncio.Task[None]]:
    """Let so many episodes ask for a slot, which those that get one keep."""

    async def episode() -> None:
        async with slots:
            await asyncio.get_running_loop().create_future()

    tasks = [asyncio.create_task(episode()) for _ in range(number)]
    await asyncio.sleep(0)
    return tasks


async def end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_fixed_number_is_never_exceeded():
    slots, live, peak = EpisodeSlots(most=3), 0, 0

    async def episode() -> None:
        nonlocal live, peak
        async with slots:
            live += 1
            peak = max(peak, live)
            await asyncio.sleep(0)
            live -= 1

    await asyncio.gather(*(episode() for _ in range(20)))
    assert peak == 3


async def test_number_doubles_while_the_engine_has_room():
    slots = slots_of(Loaded())
    tasks = await hold(slots, 100)
    seen = [slots.limit]
    for _ in range(5):
        slots.adjust()
        await asyncio.sleep(0)
        seen.append(slots.limit)
    assert seen == [4, 8, 16, 32, 64, 64]
    await end(tasks)


async def test_number_shrinks_by_the_queue_and_grows_slowly_after():
    engine = Loaded()
    slots = slots_of(engine)
    tasks = await hold(slots, 100)
    for _ in range(4):
        slots.adjust()
        await asyncio.sleep(0)
    engine.load = EngineLoad(queue=5, kv_use=0.5)
    slots.adjust()
    assert slots.limit == 59
    engine.load = EngineLoad(queue=1000, kv_use=0.5)
    slots.adjust()
    assert slots.limit == 45
    await end(tasks[:30])
    engine.load = EngineLoad(queue=0, kv_use=0.5)
    slots.adjust()
    assert slots.limit == 50
    await end(tasks)


async def test_number_stays_within_its_bounds():
    engine = Loaded(queue=1000, kv_use=1.0)
    slots = slots_of(engine)
    tasks = await hold(slots, 100)
    slots.adjust()
    assert slots.limit == slots.least == 4
    await end(tasks)


async def test_full_cache_shrinks_and_a_nearly_full_one_holds():
    engine = Loaded()
    slots = slots_of(engine, least=4, most=8)
    tasks = await hold(slots, 100)
    slots.adjust()
    await asyncio.sleep(0)
    for kv_use, limit in ((0.9, 8), (0.97, 7), (0.9, 7)):
        engine.load = EngineLoad(queue=0, kv_use=kv_use)
        slots.adjust()
        assert slots.limit == limit
    await end(tasks)


async def test_number_does_not_grow_unless_episodes_wait_for_it():
    slots = slots_of(Loaded())
    tasks = await hold(slots, 3)
    slots.adjust()
    assert slots.limit == 4
    await end(tasks)


async def test_cancelled_wait_keeps_no_slot():
    slots = EpisodeSlots(most=1)
    (first,) = await hold(slots, 1)
    (second,) = await hold(slots, 1)
    await end([second])
    await end([first])
    async with slots:
        pass


async def test_engine_without_a_load_reaches_the_upper_bound_with_a_warning(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    slots = slots_of(object(), least=4, most=8)
    tasks = await hold(slots, 20)
    slots.adjust()
    assert slots.limit == 8 and "rollout.max_concurrent" in caplog.text
    await end(tasks)


def test_engine_is_looked_at_while_an_episode_waits():
    async def main() -> int:
        slots = slots_of(Loaded(), least=1, most=8)
        tasks = await hold(slots, 20)
        await asyncio.sleep(10)
        limit = slots.limit
        await end(tasks)
        return limit

    assert run_virtual(main()) == 8
