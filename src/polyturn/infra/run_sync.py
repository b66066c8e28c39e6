"""Runs a coroutine to its end from synchronous code, in a thread with its own event loop.

    in_own_loop(fetch_schemas)                          in a new loop, which ends with the call
    in_background(session.close(), thread="openenv")    in the loop of a named thread, for objects that outlive the call

Tools fetch their schemas from a server while they are built, and rewards call a sandbox. Neither is async code.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any


def in_own_loop(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run `work()` to its end and return its result, or raise its error."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["result"] = asyncio.run(work())
        except BaseException as problem:
            outcome["error"] = problem

    thread = threading.Thread(target=run, name="polyturn-own-loop", daemon=True)
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]


_STARTING = threading.Lock()
"""Held while a loop is looked up, so that concurrent first calls get the same one."""


def in_background(work: Coroutine[Any, Any, Any], *, thread: str) -> Any:
    """Run `work` to its end in the event loop of a thread, which the first call starts and which never ends."""
    with _STARTING:
        loop = _background_loop(thread)
    return asyncio.run_coroutine_threadsafe(work, loop).result()


@functools.cache
def _background_loop(thread: str) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=thread, daemon=True).start()
    return loop
