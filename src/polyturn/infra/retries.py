"""Retries a failed call with growing waits, if the failure may be temporary. `stamina` counts and waits.

reply = await retried(ask, again=lambda problem: isinstance(problem, NotReachedError), tries=4, wait_s=0.05)
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def retried(
    call: Callable[[], Awaitable[T]],
    *,
    again: Callable[[Exception], bool | float],
    tries: int,
    wait_s: float,
    max_wait_s: float = 60.0,
    jitter_s: float = 0.0,
) -> T:
    """Call until it succeeds or may not be retried; return the result, or raise the error of the last try.

    Args:
        call: The call to make.
        again: Returns whether to retry after an error; a number is the seconds to wait before the next try.
        tries: The most calls.
        wait_s: Seconds before the second try; each further wait doubles, up to `max_wait_s`.
        max_wait_s: The longest wait, in seconds.
        jitter_s: The largest random addition to a wait, in seconds.
    """
    try:
        return await call()  # nearly always enough, and stamina's own work costs 80 µs a call
    except Exception as problem:
        if tries == 1 or again(problem) is False:  # 0 is a wait of 0 seconds
            raise
        failed = [problem]
    import stamina

    async def other() -> T:
        if failed:
            raise failed.pop()
        return await call()

    logging.getLogger("stamina").setLevel(logging.ERROR)  # it warns of each wait
    caller = stamina.AsyncRetryingCaller(
        attempts=tries, timeout=None, wait_initial=wait_s, wait_max=max_wait_s, wait_jitter=jitter_s
    )
    return await caller.on(again)(other)
