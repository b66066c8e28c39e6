"""ChatClient: sends requests to an OpenAI-compatible endpoint, for `ChatEngine`, partners and players.

    POST URL/chat/completions {"model", "messages", …}   ->   the answer's JSON

If a server is busy or fails, the request is retried with growing waits. A refusal that every request would get (a wrong key,
an unknown model) raises a ConfigError. `max_concurrent` counts the requests of all clients to the same host. The key is sent
in a header and never written anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from polyturn.core.errors import ConfigError, EngineError, one_line
from polyturn.core.secrets import bearer, hide
from polyturn.infra.http import BrokenOffError, HttpReply, JsonClient, LargeAnswerError, send_now
from polyturn.infra.retries import retried

logger = logging.getLogger(__name__)

AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Statuses after which the same request may succeed."""
HOPELESS = frozenset({401, 402, 403, 404, 405})
"""Statuses with which the server would answer every other request as well."""
MAX_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address of a served model, and the time-outs and retries of requests to it."""

    url: str
    """Address without /chat/completions; usually ends with /v1."""
    model: str
    key: str | None = None
    max_tokens: int | None = None
    """Largest number of tokens of a turn, as counted by the server; None uses the server's default."""
    max_concurrent: int = 32
    """Largest number of concurrent requests to the host, including those of other clients."""
    timeout_s: float = 300.0
    """Seconds within which one attempt must finish."""
    max_tries: int = 6
    backoff_s: float = 1.0
    """Seconds before the second attempt; the wait doubles, with jitter, up to a minute. Retry-After overrides it."""

    def __repr__(self) -> str:
        return f"Endpoint(url={self.url!r}, model={self.model!r})"  # never the key


class _TryAgainError(Exception):
    """A request failed, but may succeed later."""

    wait_s: float | None = None
    """Seconds of the server's Retry-After, if any."""


class _Hosts:
    """Counts the concurrent requests to each host, in one event loop."""

    def __init__(self) -> None:
        self._num_used: Counter[str] = Counter()
        self._freed: defaultdict[str, asyncio.Condition] = defaultdict(asyncio.Condition)

    @contextlib.asynccontextmanager
    async def slot(self, url: str, *, limit: int) -> AsyncIterator[None]:
        """Wait until the host of `url` has fewer than `limit` concurrent requests, and hold a slot in the context."""
        host = urlsplit(url).netloc
        async with self._freed[host]:
            await self._freed[host].wait_for(lambda: self._num_used[host] < limit)
            self._num_used[host] += 1
        try:
            yield
        finally:
            self._num_used[host] -= 1
            async with self._freed[host]:
                self._freed[host].notify_all()


_HOSTS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Hosts] = weakref.WeakKeyDictionary()
"""Event loop -> its hosts, because a condition of one loop cannot be awaited in another."""


class ChatClient:
    """A client of one endpoint, whose connections are open while it is in use."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Create a client without connecting.

        Raises:
            ConfigError: the address is invalid.
        """
        if not endpoint.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"the endpoint {endpoint.url!r} is not an address; use one that begins with http:// or https://"
            )
        self.endpoint = endpoint
        self.num_retries = 0
        self._client = JsonClient(
            headers=bearer(endpoint.key),
            timeout_s=endpoint.timeout_s,
            max_connections=endpoint.max_concurrent,
            uses_proxy=True,
        )
        self._num_users = 0
        self._length_name = "max_tokens"
        self._sends_seed = True

    @contextlib.asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        """Keep the connections open in the context; the last user closes them."""
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            if self._num_users == 0:
                await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def ask(self, body: Mapping[str, Any]) -> Any:
        """Return the endpoint's answer.

        Raises:
            EngineError: the server refused the request, or did not answer in `max_tries` attempts.
            ConfigError: the server would refuse every request.
        """
        endpoint, num_tries = self.endpoint, 0

        async def once() -> Any:
            nonlocal num_tries
            self.num_retries += num_tries > 0
            num_tries += 1
            return await self._once(body)

        def again(problem: Exception) -> bool | float:
            return isinstance(problem, _TryAgainError) and (problem.wait_s or True)

        half = endpoint.backoff_s / 2
        try:
            return await retried(
                once, again=again, tries=endpoint.max_tries, wait_s=half, max_wait_s=MAX_WAIT_S, jitter_s=half
            )
        except _TryAgainError as problem:
            raise EngineError(f"{endpoint.url} {problem} (after {endpoint.max_tries} attempts)") from problem

    async def _once(self, body: Mapping[str, Any]) -> Any:
        endpoint = self.endpoint
        hosts = _HOSTS.setdefault(asyncio.get_running_loop(), _Hosts())
        try:
            async with hosts.slot(endpoint.url, limit=endpoint.max_concurrent):
                used = self._length_name, self._sends_seed
                answer = await self._post(body)
                while answer.status == 400 and self._learns_from(answer.excerpt(1 << 16), *used):
                    used = self._length_name, self._sends_seed
                    answer = await self._post(body)
        except LargeAnswerError as problem:
            raise EngineError(f"{endpoint.url}: {problem}; a model does not write that much") from problem
        except (BrokenOffError, TimeoutError) as problem:
            raise _TryAgainError(f"cannot be reached ({one_line(problem)})") from problem
        if 200 <= answer.status < 300:
            try:
                return answer.json()
            except ValueError as problem:
                raise _TryAgainError(f"did not answer with JSON: {answer.excerpt(200)!r}") from problem
        if answer.status in AGAIN:
            failure = _TryAgainError(f"answered {answer.status}: {_reason(answer)}")
            failure.wait_s = answer.retry_after_s
            raise failure
        kind = ConfigError if answer.status in HOPELESS else EngineError
        raise kind(f"{endpoint.url} refused the request for {endpoint.model!r} with {answer.status}: {_reason(answer)}")

    async def _post(self, body: Mapping[str, Any]) -> HttpReply:
        sent = {name: value for name, value in body.items() if name != "seed" or self._sends_seed}
        if self.endpoint.max_tokens is not None:
            sent[self._length_name] = self.endpoint.max_tokens
        return await self._client.send("POST", f"{self.endpoint.url.rstrip('/')}/chat/completions", sent)

    def _learns_from(self, refusal: str, length_name: str, has_seed: bool) -> bool:
        """Stop sending a parameter that the server refuses; return whether to retry the request without it.

        `length_name` and `has_seed` are those of the refused request; another refusal may have changed the client's.
        """
        if "max_completion_tokens" in refusal and length_name == "max_tokens":
            self._length_name = "max_completion_tokens"
            return True
        if "seed" in refusal and has_seed:
            if self._sends_seed:
                logger.warning("%s does not accept a seed, so its samples are not reproducible", self.endpoint.url)
            self._sends_seed = False
            return True
        return False


def check_reachable(endpoint: Endpoint, *, timeout_s: float = 10.0) -> None:
    """Check that an endpoint answers a request for its list of models, which is free.

    Raises:
        ConfigError: the endpoint cannot be reached, or refuses the key.
    """
    try:
        address = f"{endpoint.url.rstrip('/')}/models"
        answer = send_now("GET", address, headers=bearer(endpoint.key), timeout_s=timeout_s)
    except (BrokenOffError, TimeoutError, LargeAnswerError) as problem:
        raise ConfigError(
            f"the endpoint {endpoint.url} for {endpoint.model!r} cannot be reached ({one_line(problem)}); start it, or "
            "correct base_url"
        ) from problem
    if answer.status in (401, 403):
        raise ConfigError(
            f"the endpoint {endpoint.url} refuses the key with {answer.status}: {_reason(answer)}; name the "
            "environment variable with the right key in api_key_env"
        )


def _reason(answer: HttpReply) -> str:
    try:
        body = answer.json()
        error = body.get("error", body)
        message = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        message = answer.excerpt()
    return hide(" ".join(message.split()), *answer.secrets)[:300] or "no reason given"
