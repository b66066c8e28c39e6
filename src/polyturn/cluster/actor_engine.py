"""ActorEngine: the client of an embedded engine in a Ray actor, for the pool of the controller or of a rollout worker."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ray.exceptions import RayActorError

from polyturn.cluster.called_engine import CalledEngine
from polyturn.cluster.members import AT_ONCE, Member, answer
from polyturn.core.errors import EngineGoneError, EngineLostError
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.core.protocols import EngineCapabilities
from polyturn.engines.pool import EnginePool


def shifted(request: GenerateRequest, seconds: float) -> GenerateRequest:
    """Shift a request's deadline by `seconds`: requests travel with the remaining time, because nodes' clocks differ."""
    return request if request.deadline is None else dataclasses.replace(request, deadline=request.deadline + seconds)


class ActorEngine(CalledEngine):
    """An engine in an actor, for a pool. It is never restarted."""

    num_restarts = 0

    def __init__(self, member: Member, capabilities: EngineCapabilities) -> None:
        super().__init__(self._call_actor, capabilities)
        self._member = member

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion.

        Raises:
            EngineLostError: the actor died.
        """
        return await super().generate(shifted(request, -asyncio.get_running_loop().time()))

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        await self._call("update_weights", version, weights)

    async def start(self) -> None:
        """Do nothing: the actor runs already."""
        return

    async def look(self) -> None:
        """Check that the actor lives.

        Raises:
            EngineLostError: the actor died.
        """
        await self._call("home")

    async def revive(self) -> None:
        """Check that the actor lives; a dead actor is not restarted.

        Raises:
            EngineGoneError: the actor died.
        """
        try:
            await self.look()
        except EngineLostError as problem:
            raise EngineGoneError(str(problem)) from problem

    async def _call_actor(self, method: str, *arguments: Any) -> Any:
        try:
            return await answer(getattr(self._member.handle, method).remote(*arguments))
        except RayActorError as problem:
            raise EngineLostError(self._member.crash_report()) from problem


def pool_of_actors(members: Sequence[Member], capabilities: EngineCapabilities, kind: type[EnginePool]) -> EnginePool:
    """Make a pool of engines in actors, for the controller or a rollout worker; the actors queue requests themselves."""
    engines = [ActorEngine(member, capabilities) for member in members]
    return kind(engines, names=[member.name for member in members], slots=AT_ONCE)
