"""A thread waits for what runs on its episode's event loop, never on the loop itself, and never beyond the episode's end."""

from __future__ import annotations

import asyncio
import concurrent.futures

import pytest

from polyturn.core.errors import LifecycleError, SchedulerError
from polyturn.rollout.bridge import LoopBridge


async def answer() -> str:
    await asyncio.sleep(0)
    return "answered"


async def test_a_thread_gets_what_the_loop_answers():
    bridge = LoopBridge()
    bridge.enter()
    assert await asyncio.to_thread(lambda: bridge.wait(answer(), of="e")) == "answered"


async def test_the_loop_does_not_wait_for_itself():
    bridge = LoopBridge()
    bridge.enter()
    with pytest.raises(SchedulerError, match="use await"):
        bridge.wait(answer(), of="e")


async def test_nothing_is_awaited_for_an_episode_that_has_ended():
    bridge = LoopBridge()
    bridge.enter()
    bridge.close()
    with pytest.raises(LifecycleError, match="episode 'e' has ended"):
        await asyncio.to_thread(lambda: bridge.wait(answer(), of="e"))


async def test_the_end_of_an_episode_frees_the_threads_that_wait():
    bridge = LoopBridge()
    bridge.enter()
    begun = asyncio.Event()

    async def forever() -> None:
        begun.set()
        await asyncio.Event().wait()

    thread = asyncio.ensure_future(asyncio.to_thread(lambda: bridge.wait(forever(), of="e")))
    await begun.wait()
    bridge.close()
    with pytest.raises((concurrent.futures.CancelledError, asyncio.CancelledError)):
        await thread
