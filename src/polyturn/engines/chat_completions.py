"""ChatEngine: a model behind an OpenAI-compatible endpoint, for evaluation. Text goes over the wire, no tokens.

    ids of `text_codec`  ->  messages, tools  ->  POST URL/chat/completions  ->  message, calls  ->  ids of `text_codec`

So the same loop, schedulers, tools and interactions run against any served model. It gives no logprobs and says so in its
capabilities: what it answered can be judged and not trained. A server that is busy or fails is asked again, ever later; a
refusal that no retry can mend (a wrong key, an unknown model) ends the run with its sentence.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx
import numpy as np

from polyturn.core.errors import ConfigError, EngineError, one_line
from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.protocols import EngineCapabilities
from polyturn.core.trajectory import SpanSource, Trajectory, TrajectoryGroup
from polyturn.tokens.text_codec import read_chat, write_turn

logger = logging.getLogger(__name__)

AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Statuses after which the same request may succeed."""
HOPELESS = frozenset({401, 402, 403, 404, 405})
"""Statuses that every other request would get too."""
MAX_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a model is served, and how patiently it is asked."""

    url: str
    """Up to and without /chat/completions, usually ending in /v1."""
    model: str
    key: str | None = None
    max_tokens: int | None = None
    """Tokens of one turn at most, as the server counts them; None leaves it to the server."""
    max_concurrent: int = 32
    timeout_s: float = 300.0
    """Deadline of one attempt."""
    max_tries: int = 6
    backoff_s: float = 1.0
    """The wait before the second attempt; it doubles, with chance, up to a minute. A server's Retry-After counts instead."""

    def __repr__(self) -> str:
        return f"Endpoint(url={self.url!r}, model={self.model!r})"  # never the key


class Usage(NamedTuple):
    """Tokens as the server counted them."""

    prompt: int = 0
    completion: int = 0


class ChatEngine:
    """Asks a chat endpoint; an `Engine` whose ids are those of `text_codec`."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Take the address; nothing is connected yet.

        Raises:
            ConfigError: it is no address.
        """
        if not endpoint.url.startswith(("http://", "https://")):
            raise ConfigError(f"the endpoint {endpoint.url!r} is no address; it begins with http:// or https://")
        self._endpoint = endpoint
        self._client: httpx.AsyncClient | None = None
        self._places = asyncio.Semaphore(endpoint.max_concurrent)
        self._length_name = "max_tokens"
        self._sends_seed = True
        self._usage: dict[str, Usage] = {}
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self.num_retries = 0

    @property
    def capabilities(self) -> EngineCapabilities:
        """No logprobs: nothing of it can be trained."""
        return EngineCapabilities()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Let the model answer the conversation.

        Raises:
            EngineError: the server refused it, or did not answer in as many tries as allowed.
            ConfigError: the server would refuse every request.
        """
        messages, tools = read_chat(request.prompt_ids)
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._endpoint.model,
            "messages": messages,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if tools:
            body["tools"] = tools
        if sampling.top_k > 0:
            body["top_k"] = sampling.top_k
        if sampling.seed is not None and sampling.temperature > 0:
            body["seed"] = sampling.seed % (1 << 31)
        task = self._tasks[request.request_id] = asyncio.ensure_future(self._ask(body))
        try:
            await asyncio.wait({task})
            if task.cancelled():
                return Completion(token_ids=np.empty(0, np.int32), finish_reason=FinishReason.ABORT)
            reply = task.result()
        finally:
            task.cancel()
            del self._tasks[request.request_id]
        return self._read(reply, request)

    async def abort(self, request_id: str) -> None:
        """End a request; its answer is empty."""
        if request_id in self._tasks:
            self._tasks[request_id].cancel()

    async def end_session(self, session_id: str) -> None:
        """Nothing is kept for an episode on the server."""

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Refuse.

        Raises:
            EngineError: always.
        """
        raise EngineError("a chat endpoint takes no weights; train with engine.kind embedded, vllm or sglang")

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def finish(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """Return a group whose trajectories say that they are text only: no weights, the server's own token counts."""
        return dataclasses.replace(group, trajectories=tuple(self._marked(t) for t in group.trajectories))

    def _marked(self, trajectory: Trajectory) -> Trajectory:
        used = self._usage.pop(trajectory.id, Usage())
        forks = [name for name in self._usage if name.startswith(f"{trajectory.id}#")]
        for name in forks:
            used = Usage(*map(sum, zip(used, self._usage.pop(name), strict=True)))
        metrics = {**trajectory.metrics, "text_only": 1.0}
        if used.completion:
            metrics |= {"server_prompt_tokens": float(used.prompt), "server_completion_tokens": float(used.completion)}
        segments = tuple(
            dataclasses.replace(
                segment,
                spans=tuple(
                    dataclasses.replace(span, weights=np.zeros(len(span), np.float32))
                    if span.source is SpanSource.SAMPLED
                    else span
                    for span in segment.spans
                ),
            )
            for segment in trajectory.segments
        )
        return dataclasses.replace(trajectory, segments=segments, metrics=metrics)

    def _read(self, reply: Mapping[str, Any], request: GenerateRequest) -> Completion:
        try:
            choice = reply["choices"][0]
            message, reason = choice["message"], choice.get("finish_reason")
            is_cut = reason == "length"
            ids = write_turn(message, is_complete=not is_cut)
        except (KeyError, IndexError, TypeError, AttributeError) as problem:
            raise EngineError(
                f"{self._endpoint.url} answered no chat completion ({one_line(problem)}): {reply!r:.300}"
            ) from None
        counted = reply.get("usage") or {}
        before = self._usage.get(request.session_id, Usage())
        self._usage[request.session_id] = Usage(
            before.prompt + int(counted.get("prompt_tokens") or 0),
            before.completion + int(counted.get("completion_tokens") or 0),
        )
        return Completion(
            token_ids=ids,
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            info={name: counted[name] for name in ("prompt_tokens", "completion_tokens") if name in counted},
        )

    async def _ask(self, body: Mapping[str, Any]) -> Any:
        place = self._endpoint
        said = ""
        for attempt in range(1, place.max_tries + 1):
            wait_s = min(MAX_WAIT_S, place.backoff_s * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
            try:
                async with self._places:
                    answer = await self._post(self._fitted(body))
            except (httpx.TransportError, TimeoutError) as problem:
                said = f"cannot be reached ({one_line(problem)})"
            else:
                if answer.status_code == 400 and self._learns_from(answer.text):
                    answer = await self._post(self._fitted(body))
                if answer.is_success:
                    try:
                        return answer.json()
                    except ValueError:
                        said = f"answered no JSON: {answer.text[:200]!r}"
                elif answer.status_code in AGAIN:
                    said = f"answered {answer.status_code}: {_reason(answer)}"
                    wait_s = _retry_after(answer) or wait_s
                else:
                    kind = ConfigError if answer.status_code in HOPELESS else EngineError
                    raise kind(
                        f"{place.url} refused the request for {place.model!r} with {answer.status_code}: {_reason(answer)}"
                    )
            if attempt < place.max_tries:
                self.num_retries += 1
                logger.debug("%s %s; asked again in %.1f s (%d of %d)", place.url, said, wait_s, attempt, place.max_tries)
                await asyncio.sleep(wait_s)
        raise EngineError(f"{place.url} {said}; asked {place.max_tries} times")

    async def _post(self, body: Mapping[str, Any]) -> httpx.Response:
        place = self._endpoint
        if self._client is None:
            headers = {} if place.key is None else {"Authorization": f"Bearer {place.key}"}
            limits = httpx.Limits(max_connections=place.max_concurrent)
            self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=None)
        async with asyncio.timeout(place.timeout_s):
            return await self._client.post(f"{place.url.rstrip('/')}/chat/completions", json=body)

    def _fitted(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body in the words that this server knows."""
        fitted = {k: v for k, v in body.items() if k != "seed" or self._sends_seed}
        if self._endpoint.max_tokens is not None:
            fitted[self._length_name] = self._endpoint.max_tokens
        return fitted

    def _learns_from(self, refusal: str) -> bool:
        """Note which optional parameter a server does not know; return whether it is worth asking again."""
        if "max_completion_tokens" in refusal and self._length_name == "max_tokens":
            self._length_name = "max_completion_tokens"
            return True
        if "seed" in refusal and self._sends_seed:
            logger.warning("%s takes no seed; its samples cannot be repeated", self._endpoint.url)
            self._sends_seed = False
            return True
        return False


def _retry_after(answer: httpx.Response) -> float | None:
    try:
        return min(MAX_WAIT_S, max(0.0, float(answer.headers["retry-after"])))
    except (KeyError, ValueError):
        return None


def _reason(answer: httpx.Response) -> str:
    try:
        found = answer.json()
        error = found.get("error", found)
        said = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        said = answer.text
    return " ".join(str(said).split())[:300] or "it gave no reason"
