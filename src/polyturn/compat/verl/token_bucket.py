"""verl's token buckets: calls per second, of which a full bucket may come at once; `acquire` waits, or says no."""

from __future__ import annotations

import asyncio
import time


class AsyncTokenBucket:
    """Lets `rate_limit` tokens a second through; `max_tokens` of them, by default as many, may come at once."""

    def __init__(self, rate_limit: float, max_tokens: float | None = None) -> None:
        self.rate_limit = rate_limit
        self.max_tokens = self.tokens = max_tokens or rate_limit
        self.last_update: float | None = None
        self.lock = asyncio.Lock()

    async def acquire(self, num_tokens: float = 1.0) -> None:
        """Take tokens once there are as many; more than ever fit in are owed, and waited for."""
        while True:
            async with self.lock:
                self._refill(asyncio.get_running_loop().time())
                wait_s = (num_tokens - self.tokens) / self.rate_limit
                is_owed = num_tokens > self.max_tokens
                if is_owed or wait_s <= 0:
                    self.tokens -= num_tokens
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            if is_owed or wait_s <= 0:
                return

    def _refill(self, now: float) -> None:
        elapsed_s = 0.0 if self.last_update is None else now - self.last_update
        self.tokens = min(self.max_tokens, self.tokens + elapsed_s * self.rate_limit)
        self.last_update = now


class TokenBucket(AsyncTokenBucket):
    """The same for callers that ask again."""

    def acquire(self) -> bool:  # type: ignore[override]
        """Take one token if there is one."""
        self._refill(time.monotonic())
        is_there = self.tokens >= 1
        self.tokens -= is_there
        return is_there
