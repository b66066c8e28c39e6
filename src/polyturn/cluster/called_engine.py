"""CalledEngine: an engine in another process of the run, used through remote calls of its methods.

worker process, embedded engine of the controller    CalledEngine(controller.call, …)             `worker_process.py`
controller or Ray worker, engine in an actor         ActorEngine(member, …), which also takes weights
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
    """An engine whose methods another process executes by name."""

    def __init__(self, call: Callable[..., Awaitable[Any]], capabilities: EngineCapabilities) -> None:
        """Use the engine through `call(method, *arguments)`."""
        super().__init__()
        self._call = call
        self._capabilities = capabilities
        self._mark = uuid.uuid4().hex[:8]
        """Prefix that keeps this process's request ids unique: another worker may resume a dead worker's episode."""

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities

    async def generate(self, request: GenerateRequest) -> Completion:
        marked = dataclasses.replace(request, request_id=f"{self._mark}/{request.request_id}")
        completion: Completion = await self._call("generate", marked)
        return completion

    async def abort(self, request_id: str) -> None:
        await self._call("abort", f"{self._mark}/{request_id}")

    async def end_session(self, session_id: str) -> None:
        await self._call("end_session", session_id)

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Refuse, because only the controller updates weights.

        Raises:
            EngineError: always.
        """
        raise EngineError(f"a rollout worker cannot send policy version {version} to the engine; only the controller can")
