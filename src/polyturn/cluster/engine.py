"""ClusterEngine: the engine of a run on a cluster. Leader and rollout workers send their requests to one `PoolActor`.

The leader also asks each server by itself, to verify its weights (`training/weight_sync.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from polyturn.cluster.members import Member, answer, own_words
from polyturn.cluster.pool_actor import News, ReplicaState, shifted
from polyturn.cluster.weights import StoredWeights
from polyturn.core.errors import EngineError, EngineLostError
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.core.protocols import EngineCapabilities
from polyturn.engines.pool import EnginePool
from polyturn.engines.recovery import Verify
from polyturn.engines.weight_checksums import ServerChecksums

logger = logging.getLogger(__name__)


class ClusterEngine:
    """All replicas as one engine; `core.protocols.Engine` and `engines.recovery.ServerPool`."""

    def __init__(self, pool: Member, capabilities: EngineCapabilities = EngineCapabilities()) -> None:  # noqa: B008
        """Ask `pool`; the leader calls `start` first, workers are given what it learnt."""
        self.pool = pool
        self._capabilities = capabilities
        self._mark = uuid.uuid4().hex[:8]
        """Before the ids of this process's requests: another one may go on with a conversation of a dead worker."""
        self._servers: dict[str, PooledReplica] = {}
        self._verify: Verify | None = None
        self._listening: asyncio.Task[None] | None = None
        self._verdicts: set[asyncio.Task[None]] = set()
        self._busy_s = 0.0
        self._is_closed = False

    def start(self, build: Callable[[], Awaitable[EnginePool]]) -> None:
        """Let the pool be built and its servers come up, and learn what they can do.

        Raises:
            EngineError, ConfigError: one does not come up.
        """
        try:
            self._capabilities, states = ray.get(self.pool.handle.start.remote(build))
        except RayTaskError as problem:
            raise own_words(problem) from None
        except RayActorError as problem:
            raise EngineLostError(self.pool.crash_report()) from problem
        self._note(states)

    # core.protocols.Engine.

    @property
    def capabilities(self) -> EngineCapabilities:
        """Capabilities that every replica has."""
        return self._capabilities

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one request was being answered, for any client."""
        if not self._is_closed:
            with contextlib.suppress(
                RayError
            ):  # a pool that is lost ends the run where it is asked for tokens or given weights
                self._busy_s = ray.get(self.pool.handle.busy_s.remote())
        return self._busy_s

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion.

        Raises:
            EngineLostError: no replica is left, or the pool itself is lost.
            EngineError: a replica refused it.
        """
        marked = dataclasses.replace(request, request_id=f"{self._mark}/{request.request_id}")
        now = asyncio.get_running_loop().time()
        completion: Completion = await self._call("generate", shifted(marked, -now))
        return completion

    async def abort(self, request_id: str) -> None:
        """End a running request now."""
        await self._call("abort", f"{self._mark}/{request_id}")

    async def end_session(self, session_id: str) -> None:
        """Forget what is kept for an episode."""
        await self._call("end_session", session_id)

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Serve `version` on every replica; the weights travel to each node once.

        Raises:
            EngineLostError: none is left.
            EngineError: one refused.
        """
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen(), name="news of the pool")
        stored = None if weights is None else await asyncio.to_thread(StoredWeights.put, weights)
        self._note(await self._call("update_weights", version, stored))

    async def sleep(self) -> None:
        """Let every replica give back the memory of its GPUs until the next weights.

        Raises:
            EngineError: one cannot.
        """
        await self._call("sleep")

    def read_metrics(self) -> Mapping[str, float]:
        """Return the counts of requests since the last call.

        Raises:
            EngineLostError: the pool is lost.
        """
        try:
            metrics: dict[str, float] = ray.get(self.pool.handle.read_metrics.remote())
        except RayActorError as problem:
            raise EngineLostError(self.pool.crash_report()) from problem
        return metrics

    async def close(self) -> None:
        """Let the servers and the pool end."""
        _ = self.busy_s
        self._is_closed = True
        for task in [*self._verdicts, *([self._listening] if self._listening is not None else [])]:
            task.cancel()
        with contextlib.suppress(EngineError, RayError):
            await self._call("close")
        ray.kill(self.pool.handle)

    # engines.recovery.ServerPool.

    @property
    def replicas(self) -> Sequence[PooledReplica]:
        """The replicas, as they were when they were last given weights."""
        return list(self._servers.values())

    @property
    def verify(self) -> Verify | None:
        """Proves that a replica that was brought back serves the pool's weights."""
        return self._verify

    @verify.setter
    def verify(self, verify: Verify) -> None:
        self._verify = verify
        self.pool.handle.verified_by_leader.remote()

    def exclude(self, replica: PooledReplica, problem: EngineError) -> None:
        """Send a replica nothing before it was given the pool's weights again."""
        replica.is_live = False
        self.pool.handle.exclude.remote(replica.name, problem)

    # The pool.

    def _note(self, states: Sequence[ReplicaState]) -> None:
        for state in states:
            server = self._servers.setdefault(state.name, PooledReplica(state.name, self._call))
            server.is_live = state.is_live

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await answer(getattr(self.pool.handle, method).remote(*arguments))
        except RayActorError as problem:
            raise EngineLostError(self.pool.crash_report()) from problem

    async def _listen(self) -> None:
        """Log what the pool logs, and answer what it asks, until it is gone."""
        with contextlib.suppress(RayActorError):
            while True:
                for news in await self.pool.handle.news.remote():
                    if news.message:
                        logger.log(news.level, "%s", news.message)
                    else:
                        answering = asyncio.create_task(self._judge(news))
                        self._verdicts.add(answering)
                        answering.add_done_callback(self._verdicts.discard)

    async def _judge(self, news: News) -> None:
        problem: EngineError | None = None
        try:
            assert self._verify is not None
            await self._verify(self._servers[news.replica].engine, news.version)
        except EngineError as caught:
            problem = caught
        await self._call("verdict", news.question, problem)


class PooledReplica:
    """One replica by itself; implements `PooledServer`."""

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        self.name = name
        self.is_live = True
        self.engine: Any = OneReplica(name, call)


class OneReplica:
    """The engine of one replica: what a proof of its weights asks of it."""

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        self._name = name
        self._call = call

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion there."""
        completion: Completion = await self._call("at", self._name, "generate", request)
        return completion

    async def end_session(self, session_id: str) -> None:
        """Forget what is kept there for an episode."""
        await self._call("at", self._name, "end_session", session_id)

    async def checksums(self) -> ServerChecksums | None:
        """Return the checksums of what it holds, if it can say."""
        checksums: ServerChecksums | None = await self._call("at", self._name, "checksums")
        return checksums
