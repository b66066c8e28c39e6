"""A thread can wait for its episode's event loop, the loop itself cannot, and nothing waits beyond the episode's end."""

from __future__ import annotations

import asyncio
import concurrent.futures

import pytest

from polyturn.core.errors import LifecycleError, SchedulerError
from polyturn.rollout.bridge import LoopBridge
from support.refusals import refuses, refuses_later


async def answer() -> str:
    await asyncio.sleep(0)
    return "answered"


async def test_thread_gets_the_answer_of_the_loop():
    bridge = LoopBridge()
    bridge.enter()
    assert await asyncio.to_thread(lambda: bridge.wait(answer(), of="e")) == "answered"


async def test_loop_does_not_wait_for_itself():
    bridge = LoopBridge()
    bridge.enter()
    refuses(lambda: bridge.wait(answer(), of="e"), SchedulerError, "await")


async def test_ended_episode_awaits_nothing():
    bridge = LoopBridge()
    bridge.enter()
    bridge.close()
    await refuses_later(lambda: asyncio.to_thread(lambda: bridge.wait(answer(), of="e")), LifecycleError, "'e'")


async def test_end_of_an_episode_frees_waiting_threads():
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
