"""ChatEngine: a model behind an OpenAI-compatible endpoint, for evaluation. It exchanges text, not tokens.

    ids of `text_codec`  ->  messages, tools  ->  POST URL/chat/completions  ->  message, calls  ->  ids of `text_codec`

So the same loop, schedulers, tools and interactions run against any served model. It returns no logprobs, as its
capabilities state: its completions can be evaluated but not trained on. `ChatClient` sends and repeats the requests.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from polyturn.core.errors import EngineError, one_line
from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.protocols import EngineCapabilities
from polyturn.core.trajectory import SpanSource, Trajectory, TrajectoryGroup
from polyturn.engines.base import BaseEngine
from polyturn.engines.text_codec import read_chat, write_turn
from polyturn.partners.client import ChatClient, Endpoint

__all__ = ["ChatEngine", "Endpoint", "Usage"]


class Usage(NamedTuple):
    """Numbers of tokens as counted by the server."""

    prompt: int = 0
    completion: int = 0


class ChatEngine(BaseEngine):
    """A client of a chat endpoint; an `Engine` whose ids are those of `text_codec`."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Make a client; nothing is connected yet.

        Raises:
            ConfigError: the endpoint's address is invalid.
        """
        super().__init__()
        self._endpoint = endpoint
        self._client = ChatClient(endpoint)
        self._usage: dict[str, Usage] = {}
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._is_closed = False

    @property
    def num_retries(self) -> int:
        """Number of repeated requests."""
        return self._client.num_retries

    @property
    def capabilities(self) -> EngineCapabilities:
        """No logprobs, so completions cannot be trained on."""
        return EngineCapabilities()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the model's answer to the conversation.

        Raises:
            EngineError: the server refused it, or did not answer in the allowed number of tries, or the client is closed.
            ConfigError: the server would refuse every request.
        """
        if self._is_closed:
            raise EngineError(f"the client of {self._endpoint.url} is closed")
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
        task = self._tasks[request.request_id] = asyncio.ensure_future(self._client.ask(body))
        try:
            with self.busy.running():
                await asyncio.wait({task})
            if task.cancelled():
                if self._is_closed:
                    raise EngineError(f"the client of {self._endpoint.url} was closed while the request ran")
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

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Raise, because a chat endpoint cannot load weights.

        Raises:
            EngineError: always.
        """
        raise EngineError("a chat endpoint cannot load weights; train with engine.kind embedded, vllm or sglang")

    async def close(self) -> None:
        """Fail live requests, and close the connections."""
        self._is_closed = True
        if tasks := set(self._tasks.values()):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)  # first, because a request that is still running would open new connections
        await self._client.close()

    def finish(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """Mark the group's trajectories as text only: set their loss weights to 0, and add the server's token counts to
        their metrics."""
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
            usage = reply.get("usage") or {}
            counts = {n: int(usage[n]) for n in ("prompt_tokens", "completion_tokens") if usage.get(n) is not None}
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as problem:
            raise EngineError(
                f"{self._endpoint.url} did not answer with a chat completion ({one_line(problem)}): {reply!r:.300}"
            ) from None
        before = self._usage.get(request.session_id, Usage())
        self._usage[request.session_id] = Usage(
            before.prompt + counts.get("prompt_tokens", 0), before.completion + counts.get("completion_tokens", 0)
        )
        return Completion(
            token_ids=ids,
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            info=counts,
        )
