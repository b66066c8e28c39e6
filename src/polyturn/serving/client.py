"""RolloutClient: requests to rollout servers from a trainer on another machine, sync or async.

    client = RolloutClient(["http://a:8000", "http://b:8000"], token="…")
    replies = client.infer([{"messages": […], "uuid": "x"}, …])     # one reply for each request, in their order
    client.push_weights(model.state_dict(), version=3)               # to all servers, verified by a probe

Several servers get contiguous shares of the requests. After a failed connection, only requests without side effects
(/health/, /probe/) are repeated. /infer/ is not, because an environment may have acted already.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyturn.core.errors import ConfigError, EngineError
from polyturn.core.secrets import bearer
from polyturn.infra.aio import first_error, in_own_loop
from polyturn.infra.http import BrokenOffError, JsonClient
from polyturn.infra.retries import retried

_TRIES, _PAUSE_S = 4, 0.2
_MAX_ANSWER_BYTES = 1 << 30
"""Largest size of an answer, which has a whole batch of trajectories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferReply:
    """The result of one request."""

    outputs: tuple[Mapping[str, Any], ...]
    """The trajectory's outputs as the server sent them, one per training sample."""
    error: str | None
    """Why the episode cannot be trained on; None if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPush:
    """The probes of one server before and after a push of weights."""

    url: str
    before: Mapping[str, Any]
    after: Mapping[str, Any]

    @property
    def has_changed(self) -> bool:
        """Whether the model's answer to the fixed prompt has changed."""
        return (self.before["token_ids"], self.before["logprobs"]) != (self.after["token_ids"], self.after["logprobs"])


class RolloutClient:
    """A client of one or several rollout servers that serve the same model."""

    def __init__(self, urls: str | Sequence[str], *, token: str | None = None, timeout_s: float = 600.0) -> None:
        """Create a client.

        Args:
            urls: The servers' addresses.
            token: The token that the servers require.
            timeout_s: Seconds before a missing reply is an error; the servers get the same deadline.
        """
        self.urls = tuple(url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls))
        if not self.urls:
            raise ConfigError("a client needs the address of at least one server")
        self._headers = bearer(token)
        self._timeout_s = timeout_s

    async def wait_ready_async(self, *, timeout_s: float = 240.0) -> None:
        """Wait until every server answers.

        Raises:
            EngineError: a server does not answer in time.
        """
        end = time.monotonic() + timeout_s
        for url in self.urls:
            while True:
                try:
                    await self._ask(url, "GET", "/health/", timeout_s=5.0)
                    break
                except EngineError as problem:
                    if time.monotonic() > end:
                        raise EngineError(f"{url} did not answer within {timeout_s:g} seconds: {problem}") from problem
                    await asyncio.sleep(0.1)

    async def infer_async(
        self, requests: Sequence[Mapping[str, Any]], config: Mapping[str, Any] | None = None
    ) -> list[InferReply]:
        """Run an episode for each request and return the replies in their order.

        Raises:
            ConfigError: two requests have the same uuid.
            EngineError: a server cannot be reached, or refuses the whole batch.
        """
        own = {str(request["uuid"]) for request in requests if request.get("uuid")}
        free = (name for i in itertools.count() if (name := f"q{i}") not in own)
        named = [{**request, "uuid": str(request.get("uuid") or next(free))} for request in requests]
        if len({request["uuid"] for request in named}) < len(named):
            raise ConfigError("two requests have the same uuid; use different ones, or none")
        share = -(-len(named) // len(self.urls))
        chunks = [named[i : i + share] for i in range(0, len(named), max(share, 1))]
        with first_error():
            async with asyncio.TaskGroup() as group:
                bodies = [
                    group.create_task(self._infer(url, chunk, config)) for url, chunk in zip(self.urls, chunks, strict=False)
                ]
        by_request: dict[str, list[Mapping[str, Any]]] = {}
        for task in bodies:
            for output in task.result():
                by_request.setdefault(output["response"]["id"], []).append(output)
        replies = []
        for request in named:
            outputs = tuple(by_request.get(request["uuid"], ()))
            error = outputs[0].get("error") if outputs else "the server's reply has no output for this request"
            replies.append(InferReply(outputs=outputs, error=error))
        return replies

    async def push_weights_async(self, weights: Mapping[str, Any], *, version: int) -> list[WeightPush]:
        """Send tensors to every server and verify with a probe that each serves them.

        Raises:
            EngineError: a server refuses the tensors or still serves another version, or two servers answer differently.
        """
        from safetensors.torch import save

        body = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()})
        pushes = []
        for url in self.urls:
            before = await self._ask(url, "POST", "/probe/")
            await self._ask(url, "POST", f"/update_weights/?version={version}", body)
            after = await self._ask(url, "POST", "/probe/")
            if after["version"] != version:
                raise EngineError(f"{url} was sent version {version} but answers as version {after['version']}")
            pushes.append(WeightPush(url=url, before=before, after=after))
        for push in pushes[1:]:
            if push.after["token_ids"] != pushes[0].after["token_ids"]:
                raise EngineError(f"{push.url} and {pushes[0].url} were sent the same weights but answer differently")
        return pushes

    def wait_ready(self, *, timeout_s: float = 240.0) -> None:
        """Run `wait_ready_async` from synchronous code."""
        in_own_loop(lambda: self.wait_ready_async(timeout_s=timeout_s))

    def infer(self, requests: Sequence[Mapping[str, Any]], config: Mapping[str, Any] | None = None) -> list[InferReply]:
        """Run `infer_async` from synchronous code."""
        replies: list[InferReply] = in_own_loop(lambda: self.infer_async(requests, config))
        return replies

    def push_weights(self, weights: Mapping[str, Any], *, version: int) -> list[WeightPush]:
        """Run `push_weights_async` from synchronous code."""
        pushes: list[WeightPush] = in_own_loop(lambda: self.push_weights_async(weights, version=version))
        return pushes

    async def _infer(self, url: str, chunk: Sequence[Any], config: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        body = {"infer_requests": chunk, "request_config": config, "timeout_s": self._timeout_s}
        return await self._ask(url, "POST", "/infer/", body, timeout_s=self._timeout_s + 10)  # type: ignore[no-any-return]

    async def _ask(self, url: str, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        is_safe = method == "GET" or path == "/probe/"
        client = JsonClient(headers=self._headers, timeout_s=timeout_s or self._timeout_s)
        try:
            reply = await retried(
                lambda: client.send(method, url + path, body, max_bytes=_MAX_ANSWER_BYTES),
                again=lambda problem: isinstance(problem, BrokenOffError | TimeoutError),
                tries=_TRIES if is_safe else 1,
                wait_s=_PAUSE_S,
            )
        except (BrokenOffError, TimeoutError) as problem:
            raise EngineError(f"{url}{path} cannot be reached: {type(problem).__name__} {problem}") from problem
        finally:
            await client.close()
        if reply.status != 200:
            raise EngineError(f"{url}{path} answers {reply.status}: {reply.excerpt()}")
        try:
            return reply.json()
        except ValueError as problem:
            raise EngineError(
                f"{url}{path} does not answer with JSON as a rollout server does: {reply.excerpt(200)!r}"
            ) from problem
