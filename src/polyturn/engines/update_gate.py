"""UpdateGate: decides how new weights affect running completions.

    in_flight       they continue with the new weights:         [ version 4 4 4 4 | 5 5 5 5 ]   one request
    wait            the weights wait for their end:             [ version 4 4 4 4 4 4 4 ]   then the weights
    abort_resume    they are cut and resumed as new requests:   [ version 4 4 4 4 ] + [ 5 5 5 5 ]   two requests

The gate works with every engine: it is between the episodes and an engine, and closed while weights are published. Rollout
workers that call servers directly have a gate each. In all three modes a completion records the version of each token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

from polyturn.core.continuation import continued, joined, nothing
from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.protocols import Engine
from polyturn.engines.base import EngineWrapper

UpdateMode = Literal["in_flight", "wait", "abort_resume"]


class UpdateGate(EngineWrapper):
    """An engine whose requests can be held back; `core.protocols.Engine`."""

    def __init__(self, engine: Engine, *, mode: UpdateMode) -> None:
        super().__init__(engine)
        self.mode = mode
        self._live: dict[str, bool] = {}
        """Requests -> whether their caller has requested the end."""
        self._sampling: set[str] = set()
        """The requests that the engine has."""
        self._is_open = True
        self._news = asyncio.Event()
        """Set for a moment when the gate opens, or a caller requests the end of a request."""
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion; while weights change, it waits, or is cut and resumed.

        Raises:
            EngineError: raised by the engine.
        """
        if self.mode == "in_flight":
            return await self.engine.generate(request)
        parts: list[Completion] = []
        self._live[request.request_id] = False
        try:
            while await self._opened(request):
                parts.append(await self._sample(continued(request, parts)))
                is_cut = parts[-1].finish_reason is FinishReason.ABORT and not self._live[request.request_id]
                # `wait` never aborts, so the engine itself cut this request.
                if self.mode == "wait" or self._is_open or not is_cut:
                    break
        finally:
            del self._live[request.request_id]
        return joined(parts) if parts else nothing(0)

    async def abort(self, request_id: str) -> None:
        """End a request now; its `generate` returns the tokens so far."""
        if request_id in self._live:
            self._live[request_id] = True
            self._announce()
        await self.engine.abort(request_id)

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Update the engine's weights according to the mode."""
        async with self.closed():
            await self.engine.update_weights(version, weights=weights)

    async def _opened(self, request: GenerateRequest) -> bool:
        """Wait until requests may run; return False if the caller requests the end of this one, or it is late, before."""
        while not (self._is_open or self._live[request.request_id]):  # it may close again before the waiting requests run
            try:
                async with asyncio.timeout_at(request.deadline):
                    await self._news.wait()
            except TimeoutError:
                return False
        return not self._live[request.request_id]

    async def _sample(self, request: GenerateRequest) -> Completion:
        self._sampling.add(request.request_id)
        self._is_idle.clear()
        try:
            return await self.engine.generate(request)
        finally:
            self._sampling.discard(request.request_id)
            if not self._sampling:
                self._is_idle.set()

    def _announce(self) -> None:
        self._news.set()
        self._news.clear()

    def hold(self) -> None:
        """Hold new requests back until `release`; in mode in_flight, do nothing."""
        self._is_open = self.mode == "in_flight"

    async def drain(self) -> None:
        """Return once no request runs while they are held back; in mode abort_resume, cut those that run."""
        if self._is_open:
            return
        if self.mode == "abort_resume":
            for request_id in list(self._sampling):
                await self.engine.abort(request_id)
        await self._is_idle.wait()

    async def pause(self) -> None:
        """Hold new requests back, and return once no request runs; `closed` lets them run again."""
        self.hold()
        await self.drain()

    def release(self) -> None:
        """Let requests run again."""
        self._is_open = True
        self._announce()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Hold requests back while weights change: within the context no episode is sampling, except in mode in_flight."""
        try:
            await self.pause()
            yield
        finally:
            self.release()
