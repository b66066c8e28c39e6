"""Retries: a call that failed for a reason that time may mend is made again, ever later. `stamina` counts and waits.

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
    """Return the result of `call`, made again while it may be; raise the error of its last try.

    Args:
        call: What is tried.
        again: Whether a failure may be tried again; a number is how many seconds to wait before.
        tries: Calls at most.
        wait_s: The wait before the second try; it doubles, up to `max_wait_s`.
        max_wait_s: The longest wait.
        jitter_s: What chance adds to a wait, at most.
    """
    try:
        return await call()  # nearly always enough, and stamina's own work costs 80 µs a call
    except Exception as problem:
        if tries == 1 or not again(problem):
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
