"""HttpService: the client of one HTTP endpoint, with a concurrency limit, a deadline, and a status for each kind of failure.

    service = HttpService("http://127.0.0.1:8000/retrieve", timeout_s=30, max_concurrent=120)
    service.open()                       once per instance of the tool, paired with close
    reply = await service.post({...})    ServiceReply(status="ok", data={...}) or (status="timeout", error="…")
    await service.close()                the last one closes the connections

The deadline covers a whole call with its retries, but not the wait for a slot. The limit applies to one tool in one process.
An answer beyond the size limit is not read to its end; its status is `bad_reply`. Connections are open only while instances
live, so that no connection outlives its event loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from polyturn.core.errors import ConfigError, LifecycleError
from polyturn.core.secrets import bearer, token_from
from polyturn.infra.http import BrokenOffError, JsonClient, LargeAnswerError
from polyturn.infra.retries import retried
from polyturn.infra.settings import AtLeastOne, Settings, Text
from polyturn.tools.failures import ToolFailure

Status = Literal["ok", "timeout", "unreachable", "server_error", "refused", "bad_reply"]
MAX_QUOTED = 1 << 16
"""Maximum size in bytes of an answer that an error message quotes in part."""
RETRIED = (500, 502, 503, 504)
"""HTTP statuses after which the call is tried again."""


FAILURES: dict[Status, ToolFailure] = {
    "timeout": ToolFailure.TIMEOUT,
    "unreachable": ToolFailure.CONNECTION,
    "server_error": ToolFailure.EXCEPTION,
    "refused": ToolFailure.TOOL_ERROR,
    "bad_reply": ToolFailure.EXCEPTION,
}
"""Status of a reply -> the kind of failure that it counts as."""


class WorkerSettings(Settings):
    """The number of calls of a tool that run at once."""

    type: str = "native"
    num_workers: AtLeastOne
    rate_limit: AtLeastOne
    enable_global_rate_limit: bool = True
    """Whether `rate_limit` limits the concurrent calls as well; if false, only `num_workers` does."""
    max_concurrency: AtLeastOne | None = None
    """Maximum number of concurrent calls that the run makes; null means no limit."""

    @property
    def max_concurrent(self) -> int:
        """Maximum number of concurrent calls."""
        return min(self.num_workers, self.rate_limit) if self.enable_global_rate_limit else self.num_workers


class ServiceSettings(WorkerSettings):
    """The settings of a tool that asks an HTTP service."""

    max_retries: AtLeastOne
    """Maximum number of tries of a call, including the first."""
    retry_delay: Annotated[float, Field(ge=0)] = 1.0
    """Seconds to pause after the first try; the pause after the n-th try is n times as long."""
    token: str | None = None
    token_env: Text | None = None
    """The environment variable that contains the token; set it instead of `token`."""

    def service(self, url: str, *, timeout_s: float) -> HttpService:
        """Return the client of the service.

        Raises:
            ConfigError: the URL is invalid, or the token is missing.
        """
        secrets = {"token": self.token, "token_env": self.token_env}
        return HttpService(
            url,
            timeout_s=timeout_s,
            max_concurrent=self.max_concurrent,
            max_tries=self.max_retries,
            retry_delay_s=self.retry_delay,
            token=token_from(secrets, where=f"the tool that asks {url}"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceReply:
    """The answer of a service, or the reason for a failure."""

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
        """Store the settings; `open` makes the connections.

        Args:
            url: The URL to post to.
            timeout_s: Deadline of one call including all its tries, in seconds.
            max_concurrent: Maximum number of concurrent calls.
            max_tries: Maximum number of tries while the service is unreachable or answers with one of `RETRIED`.
            retry_delay_s: Seconds to pause after the first try; the pause after the n-th try is n times as long.
            token: The service's token, sent as `Authorization: Bearer` and never shown in errors.

        Raises:
            ConfigError: a value is invalid.
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
        self._client = JsonClient(headers=bearer(token), timeout_s=None, max_connections=max_concurrent)
        self._num_users = 0
        self._limit = asyncio.Semaphore(max_concurrent)

    @property
    def num_users(self) -> int:
        """Number of users that keep the connections open."""
        return self._num_users

    def open(self) -> None:
        """Add a user; the first one makes the connections. Call this on the event loop that uses them."""
        self._num_users += 1
        if self._num_users == 1:
            self._limit = asyncio.Semaphore(self._max_concurrent)

    async def close(self) -> None:
        """Remove a user; the last one closes the connections."""
        self._num_users -= 1
        if self._num_users == 0:
            await self._client.close()

    async def post(self, payload: dict[str, Any]) -> ServiceReply:
        """Post `payload` and return the reply, which reports failures; only a cancellation or a missing `open` raises."""
        if not self._num_users:
            raise LifecycleError(f"{self.url}: posted to before `open` or after the last `close`")
        last: list[ServiceReply] = []

        async def once() -> ServiceReply:
            reply, is_final = await self._try(payload, number=len(last) + 1)
            last.append(reply)
            if not is_final and len(last) < self._max_tries:
                raise _ServiceBusyError
            return reply

        try:
            async with self._limit, asyncio.timeout(self.timeout_s):
                return await retried(
                    once,
                    again=lambda problem: isinstance(problem, _ServiceBusyError) and self._retry_delay_s * len(last),
                    tries=self._max_tries,
                    wait_s=self._retry_delay_s,
                )
        except TimeoutError:
            seen = f"; the last try ended with: {last[-1].error}" if last and last[-1].error else ""
            return ServiceReply(
                status="timeout", error=f"no answer within {self.timeout_s:g} s{seen}", num_tries=max(1, len(last))
            )

    async def _try(self, payload: dict[str, Any], *, number: int) -> tuple[ServiceReply, bool]:
        """Post once; return the reply, and whether it is final."""
        try:
            answer = await self._client.send("POST", self.url, payload)
        except LargeAnswerError as problem:
            return ServiceReply(status="bad_reply", error=str(problem), num_tries=number), True
        except BrokenOffError as problem:
            return ServiceReply(status="unreachable", error=str(problem), num_tries=number), False
        if 300 <= answer.status < 400:  # a redirect is not followed, and its text is not quoted
            error = f"HTTP {answer.status}: redirects are not followed; give the address that this one leads to"
            return ServiceReply(status="refused", error=error, num_tries=number), True
        text = answer.excerpt(200) if len(answer.content) < MAX_QUOTED else ""
        if answer.status >= 400:
            kind: Status = "server_error" if answer.status >= 500 else "refused"
            failed = ServiceReply(status=kind, error=f"HTTP {answer.status}: {text}", num_tries=number)
            return failed, answer.status not in RETRIED
        try:
            return ServiceReply(status="ok", data=answer.json(), num_tries=number), True
        except ValueError:
            return ServiceReply(status="bad_reply", error=f"the reply is not JSON: {text}", num_tries=number), True


class _ServiceBusyError(Exception):
    """The service answered with one of `RETRIED`, so that another try may succeed."""
