"""Runs a coroutine to its end from synchronous code, in a thread with its own event loop if a loop is already running.

Tools ask a server for their schemas while they are built, and rewards a sandbox for a score: neither is async code.
"""

from __future__ import annotations

import asyncio
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
