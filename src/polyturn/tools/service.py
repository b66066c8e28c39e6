"""HttpService: one HTTP endpoint that a tool asks, with its own limit, its own deadline and its failures told apart.

    service = HttpService("http://127.0.0.1:8000/retrieve", timeout_s=30, max_concurrent=120)
    service.open()                       one per instance of the tool, paired with close
    reply = await service.post({...})    Reply(status="ok", data={...}) or Reply(status="timeout", error="…")
    await service.close()                the last one closes the connections

The deadline covers a whole call with its retries, and not the wait for a turn. The limit belongs to one tool in one process,
waiting for it blocks nothing, and an answer that is too large is not read. Connections live exactly as long as instances
do, so an event loop that ends leaves none behind.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from polyturn.core.answers import LargeAnswerError, whole
from polyturn.core.errors import ConfigError, LifecycleError, one_line
from polyturn.core.secret import bearer, hide
from polyturn.tools.failures import ToolFailure

Status = Literal["ok", "timeout", "unreachable", "server_error", "refused", "bad_reply"]
MAX_QUOTED = 1 << 16
"""Bytes of an answer of which a part is quoted; of longer ones none is."""
RETRIED = (500, 502, 503, 504)
"""HTTP statuses that another try may mend."""


FAILURES: dict[Status, ToolFailure] = {
    "timeout": ToolFailure.TIMEOUT,
    "unreachable": ToolFailure.CONNECTION,
    "server_error": ToolFailure.EXCEPTION,
    "refused": ToolFailure.TOOL_ERROR,
    "bad_reply": ToolFailure.EXCEPTION,
}
"""What a call that ended so is counted as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceReply:
    """What a service answered, or why there is no answer."""

    status: Status
    data: Any = None
    """The reply's JSON; None unless the status is ok."""
    error: str = ""
    num_tries: int = 1

    @property
    def failure(self) -> str | None:
        """The kind of failure; None for an answer."""
        return None if self.status == "ok" else FAILURES[self.status].value


class HttpService:
    """Posts JSON and reads JSON."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        max_concurrent: int,
        max_tries: int = 10,
        retry_delay_s: float = 1.0,
        token: str | None = None,
    ) -> None:
        """Describe the service; nothing is opened yet.

        Args:
            url: Where to post to.
            timeout_s: Deadline of one call, with all its tries.
            max_concurrent: How many calls may be on their way at once.
            max_tries: How often a call is tried while the service is unreachable or answers one of `RETRIED`.
            retry_delay_s: Pause after the first try; after the n-th it is n times as long.
            token: What the service demands, sent as `Authorization: Bearer`; no error shows it.

        Raises:
            ConfigError: a value cannot work.
        """
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"the URL of a service is {url!r}; it must start with http:// or https://")
        if timeout_s <= 0 or max_concurrent < 1 or max_tries < 1:
            raise ConfigError(
                f"{url}: timeout {timeout_s}, {max_concurrent} concurrent calls and {max_tries} tries cannot work; "
                "each must be positive"
            )
        self.url = url
        self.timeout_s = timeout_s
        self._max_concurrent = max_concurrent
        self._max_tries = max_tries
        self._retry_delay_s = retry_delay_s
        self._token = token
        self._num_users = 0
        self._session: aiohttp.ClientSession | None = None
        self._limit = asyncio.Semaphore(max_concurrent)

    @property
    def num_users(self) -> int:
        """How many users hold the connections open."""
        return self._num_users

    def open(self) -> None:
        """Count one user; the first one makes the connections. Call it in the event loop that is to use them."""
        self._num_users += 1
        if self._session is None:
            self._limit = asyncio.Semaphore(self._max_concurrent)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._max_concurrent),
                timeout=aiohttp.ClientTimeout(total=None),
                headers=bearer(self._token),
            )

    async def close(self) -> None:
        """Count one user off; the last one closes the connections."""
        self._num_users -= 1
        if self._num_users == 0 and self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def post(self, payload: dict[str, Any]) -> ServiceReply:
        """Post `payload` and return the reply; only a cancellation is raised."""
        if self._session is None:
            raise LifecycleError(f"{self.url}: posted to before `open` or after the last `close`")
        last = ServiceReply(status="timeout", error="it was never sent", num_tries=0)
        try:
            async with self._limit, asyncio.timeout(self.timeout_s):
                for number in range(1, self._max_tries + 1):
                    last, is_final = await self._try(self._session, payload, number)
                    if is_final or number == self._max_tries:
                        return last
                    await asyncio.sleep(self._retry_delay_s * number)
        except TimeoutError:
            seen = f"; the last try ended with: {last.error}" if last.num_tries and last.error else ""
            return ServiceReply(
                status="timeout", error=f"no answer within {self.timeout_s:g} s{seen}", num_tries=max(1, last.num_tries)
            )
        return last

    async def _try(self, session: aiohttp.ClientSession, payload: dict[str, Any], number: int) -> tuple[ServiceReply, bool]:
        """Post once; return the reply, and whether it is final."""
        try:
            async with session.post(self.url, json=payload, allow_redirects=False) as response:
                status = response.status
                if 300 <= status < 400:  # to where it leads, nobody asked us to send anything, nor to quote it
                    error = f"HTTP {status}: it redirects, which is not followed; give the address that it leads to"
                    return ServiceReply(status="refused", error=error, num_tries=number), True
                body = await whole(response.content.iter_any())
        except LargeAnswerError as problem:
            return ServiceReply(status="bad_reply", error=f"HTTP {status}: {problem}", num_tries=number), True
        except aiohttp.ClientError as problem:
            return ServiceReply(status="unreachable", error=hide(one_line(problem), self._token), num_tries=number), False
        said = hide(body.decode(errors="replace"), self._token)[:200] if len(body) < MAX_QUOTED else ""
        if status >= 400:
            kind: Status = "server_error" if status >= 500 else "refused"
            return ServiceReply(status=kind, error=f"HTTP {status}: {said}", num_tries=number), status not in RETRIED
        try:
            return ServiceReply(status="ok", data=json.loads(body), num_tries=number), True
        except (ValueError, RecursionError):
            return ServiceReply(status="bad_reply", error=f"the reply is no JSON: {said}", num_tries=number), True
