"""The processes on the nodes of a cluster: a rank, an engine replica, or a rollout worker, each a Ray actor.

    driver (controller)     RankActor x ranks            parameters, gradients, moments; one process group among themselves
    loop, evaluation,       EngineActor x replicas       weights for sampling: the embedded engine
    the pool of engines     ServerActor x replicas       or an inference server (`servers.py`)
                            RolloutActor x workers       episodes: tools, interactions, rewards; they call the engines

An actor receives a function that builds its part, not a configuration, so this file is independent of the parts. Each actor
reports its log files, so that the controller can quote them if the actor dies.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from polyturn.cluster.actor_engine import shifted
from polyturn.cluster.members import Actor
from polyturn.cluster.worker import RolloutWorker
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.core.protocols import Engine, EngineCapabilities
from polyturn.infra.process import free_port
from polyturn.training.rank_group import RankReply, RankWorker


class RankActor(Actor):
    """A trainer rank; its calls run in the main thread, one after the other."""

    def free_port(self) -> int:
        return free_port("")

    def join(self, rank: int, num_ranks: int, address: str, port: int, build: Callable[[], RankWorker]) -> None:
        """Join the process group of all ranks, and build this rank."""
        logging.basicConfig(stream=sys.stderr, level=logging.INFO)
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK="0", MASTER_ADDR=address, MASTER_PORT=str(port)
        )
        self._rank = build()

    def run(self, command: str, share: tuple[Any, ...]) -> RankReply:
        return self._rank.run(command, share)


class EngineActor(Actor):
    """An engine replica; calls run concurrently on its event loop."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._engine = build()

    async def capabilities(self) -> EngineCapabilities:
        return self._engine.capabilities

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self._engine.generate(shifted(request, asyncio.get_running_loop().time()))

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def end_session(self, session_id: str) -> None:
        await self._engine.end_session(session_id)

    async def update_weights(self, version: int, weights: Mapping[str, Any] | None) -> None:
        if weights is not None:
            weights = await asyncio.to_thread(dict, weights)  # fetches them from another node without blocking requests
        await self._engine.update_weights(version, weights=weights)


class RolloutActor(RolloutWorker, Actor):
    """A rollout worker; calls run concurrently on its event loop."""
