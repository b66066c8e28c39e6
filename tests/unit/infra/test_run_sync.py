"""Coroutines run from synchronous code."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from polyturn.infra.run_sync import in_background


async def running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_background_work_of_one_thread_shares_its_loop() -> None:
    with ThreadPoolExecutor(8) as callers:
        loops = list(callers.map(lambda number: in_background(running_loop(), thread=f"t{number % 2}"), range(64)))
    assert [len(set(loops[::2])), len(set(loops[1::2])), len(set(loops))] == [1, 1, 2]
