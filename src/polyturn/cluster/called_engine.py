"""CalledEngine: an engine in another process of the run, asked by calls of its methods.

worker process, embedded engine of the leader      CalledEngine(leader.call, …)                `worker_process.py`
controller or Ray worker, engine in an actor       ActorEngine(member, …), which also takes weights
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from polyturn.core.errors import EngineError
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.core.protocols import EngineCapabilities
from polyturn.engines.base import BaseEngine


class CalledEngine(BaseEngine):
    """An engine whose methods another process offers by their names."""

    def __init__(self, call: Callable[..., Awaitable[Any]], capabilities: EngineCapabilities) -> None:
        """Ask by `call(method, *arguments)`."""
        super().__init__()
        self._call = call
        self._capabilities = capabilities
        self._mark = uuid.uuid4().hex[:8]
        """Before the ids of this process's requests: another one may go on with a conversation of a dead worker."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """Capabilities of the engine there."""
        return self._capabilities

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion."""
        marked = dataclasses.replace(request, request_id=f"{self._mark}/{request.request_id}")
        completion: Completion = await self._call("generate", marked)
        return completion

    async def abort(self, request_id: str) -> None:
        """End a running request now."""
        await self._call("abort", f"{self._mark}/{request_id}")

    async def end_session(self, session_id: str) -> None:
        """Forget what is kept for an episode."""
        await self._call("end_session", session_id)

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Refuse, for only the leader brings weights.

        Raises:
            EngineError: always.
        """
        raise EngineError(f"a rollout worker was to bring version {version} to the engine, which only the leader does")
