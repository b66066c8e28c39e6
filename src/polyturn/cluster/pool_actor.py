"""The one pool of a run on a cluster: an actor for leader and workers, so that its queue covers the whole cluster.

    worker, leader   ClusterEngine.generate     ->  PoolActor  ->  EnginePool  ->  a server on a node, or an EngineActor
    leader           update_weights, exclude    ->             references to weights, no tensors
    leader           ClusterEngine._listen      <-  news       servers to verify, and the pool's log lines: a long poll

Tokens go from server to worker through this actor, which is not in the leader's process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ray.exceptions import RayActorError

from polyturn.cluster.members import AT_ONCE, Actor, Member, answer
from polyturn.core.errors import EngineError, EngineGoneError, EngineLostError
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.core.protocols import Engine, EngineCapabilities
from polyturn.engines.base import BaseEngine
from polyturn.engines.pool import EnginePool


class ReplicaState(NamedTuple):
    """One server of the pool."""

    name: str
    is_live: bool


class News(NamedTuple):
    """A message of the pool to the leader."""

    level: int = 0
    message: str = ""
    """To be logged."""
    question: int = 0
    """The number of the server to verify, if any."""
    replica: str = ""
    version: int = 0


def shifted(request: GenerateRequest, seconds: float) -> GenerateRequest:
    """Return a request with its deadline as remaining time, because nodes' clocks differ."""
    return request if request.deadline is None else dataclasses.replace(request, deadline=request.deadline + seconds)


class PoolActor(Actor):
    """Owns the pool; calls run concurrently on its event loop."""

    def __init__(self) -> None:
        self._pool = EnginePool()
        self._news: list[News] = []
        self._has_news = asyncio.Event()
        self._asked: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count(1)

    async def start(self, build: Callable[[], Awaitable[EnginePool]]) -> tuple[EngineCapabilities, list[ReplicaState]]:
        """Make the pool; return its servers' capabilities once they are ready."""
        loop = asyncio.get_running_loop()
        handler = _ToLeader(lambda news: loop.call_soon_threadsafe(self._say, news))
        logging.getLogger("polyturn").addHandler(handler)
        logging.getLogger("polyturn").setLevel(logging.INFO)
        self._pool = await build()
        return self._pool.capabilities, self.states()

    def states(self) -> list[ReplicaState]:
        """Return the servers, and which of them serve."""
        return [ReplicaState(replica.name, replica.is_live) for replica in self._pool.replicas]

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion, on whichever server."""
        return await self._pool.generate(shifted(request, asyncio.get_running_loop().time()))

    async def abort(self, request_id: str) -> None:
        """End a request now."""
        await self._pool.abort(request_id)

    async def end_session(self, session_id: str) -> None:
        """Forget an episode."""
        await self._pool.end_session(session_id)

    async def update_weights(self, version: int, weights: Mapping[str, Any] | None) -> list[ReplicaState]:
        """Bring every server to `version`, and return which of them serve it."""
        await self._pool.update_weights(version, weights=weights)
        return self.states()

    async def sleep(self) -> None:
        """Let every server free its memory until the next weights."""
        await self._pool.sleep()

    async def exclude(self, name: str, problem: EngineError) -> None:
        """Send a server no requests until it has the pool's weights again."""
        self._pool.exclude(self._replica(name), problem)

    async def at(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a method of one server's engine."""
        return await getattr(self._replica(name).engine, method)(*arguments)

    async def verified_by_leader(self) -> None:
        """Let the leader verify every server that comes back, from now on."""
        self._pool.verify = self._verify

    async def news(self) -> list[News]:
        """Return the news, once there are any."""
        await self._has_news.wait()
        self._has_news.clear()
        events, self._news = self._news, []
        return events

    async def verdict(self, question: int, problem: EngineError | None) -> None:
        """Take the leader's answer to a question."""
        future = self._asked.pop(question, None)
        if future is None or future.done():  # the caller waits no more
            return
        if problem is None:
            future.set_result(None)
        else:
            future.set_exception(problem)

    async def busy_s(self) -> float:
        """Return the seconds in which at least one request was being answered."""
        return self._pool.busy_s

    async def read_metrics(self) -> dict[str, float]:
        """Return the counts of requests since the last call."""
        return self._pool.read_metrics()

    async def close(self) -> None:
        """Close all servers."""
        await self._pool.close()

    def _replica(self, name: str) -> Any:
        return next(replica for replica in self._pool.replicas if replica.name == name)

    async def _verify(self, engine: Engine, version: int) -> None:
        name = next(replica.name for replica in self._pool.replicas if replica.engine is engine)
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self._say(News(question=number, replica=name, version=version))
        try:
            await future
        finally:
            self._asked.pop(number, None)

    def _say(self, news: News) -> None:
        self._news.append(news)
        self._has_news.set()


class _ToLeader(logging.Handler):
    """Lets what is logged here be logged where people look."""

    def __init__(self, say: Callable[[News], object]) -> None:
        super().__init__(logging.INFO)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record."""
        self._say(News(level=record.levelno, message=self.format(record)))


class ActorEngine(BaseEngine):
    """An engine in an actor on a node, for the pool; it is not restarted."""

    num_restarts = 0

    def __init__(self, member: Member, capabilities: EngineCapabilities) -> None:
        super().__init__()
        self._member = member
        self._capabilities = capabilities

    @property
    def capabilities(self) -> EngineCapabilities:
        """Capabilities of the engine in the actor."""
        return self._capabilities

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion.

        Raises:
            EngineLostError: the actor died.
        """
        completion: Completion = await self._call("generate", shifted(request, -asyncio.get_running_loop().time()))
        return completion

    async def abort(self, request_id: str) -> None:
        """End a running request now."""
        await self._call("abort", request_id)

    async def end_session(self, session_id: str) -> None:
        """Forget what is kept for an episode."""
        await self._call("end_session", session_id)

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Serve `version` from now on."""
        await self._call("update_weights", version, weights)

    async def revive(self) -> None:
        """Return if the actor lives.

        Raises:
            EngineGoneError: it does not.
        """
        try:
            await self._call("home")
        except EngineLostError as problem:
            raise EngineGoneError(str(problem)) from problem

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await answer(getattr(self._member.handle, method).remote(*arguments))
        except RayActorError as problem:
            raise EngineLostError(self._member.crash_report()) from problem


async def replica_pool(members: Sequence[Member], capabilities: EngineCapabilities) -> EnginePool:
    """Make a pool of engines in actors, which queue by themselves."""
    engines = [ActorEngine(member, capabilities) for member in members]
    pool = EnginePool(slots=AT_ONCE)
    for member, engine in zip(members, engines, strict=True):
        pool.join(engine, name=member.name)
    return pool
