"""EnginePool: many servers behind one `Engine`, with the order in which requests are admitted, and what is lost redone.

A request waits here until a server has a place. An episode's turns go where its prefix is cached while that server has a
place; else they move, which costs its prefill. A server that is lost (`EngineLostError`) is left out, tried again later with
one request, and what it held is asked of another one. A request holds the whole prompt, so that the turn is done again from
its last complete turn, and only one answer of it is ever returned: no token is trained twice.

A server that answers with older weights than it had when it was asked was restarted: the answer is dropped and the server
stays out until the next weights.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyturn.core.aio import first_error
from polyturn.core.errors import ConfigError, EngineError, one_line
from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.protocols import Engine, EngineCapabilities
from polyturn.engines.order import OrderPolicy, make_policy
from polyturn.engines.remote import EngineLostError

logger = logging.getLogger(__name__)

_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 60.0


@dataclass(slots=True, eq=False)
class Replica:
    """One server of the pool."""

    engine: Engine
    name: str
    index: int
    slots: int
    version: int = 0
    running: dict[str, _Waiting] = field(default_factory=dict)
    is_up: bool = True
    is_stale: bool = False
    """Its weights are older than the pool's."""
    is_leaving: bool = False
    probes_at: float = 0.0
    """When a server that is down may be asked again."""
    pause_s: float = _FIRST_RETRY_S
    num_done: int = 0
    num_lost: int = 0

    @property
    def load(self) -> int:
        """How many requests run there."""
        return len(self.running)

    def takes_work(self, now: float) -> bool:
        """Return whether a request may be sent there."""
        if self.is_stale or self.is_leaving:
            return False
        if not self.is_up:
            return now >= self.probes_at and not self.running  # one request finds out
        return len(self.running) < self.slots


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request of the pool, from its arrival to its answer."""

    request: GenerateRequest
    arrived: float
    place: asyncio.Future[Replica]
    is_gone: bool = False
    is_aborted: bool = False


class EnginePool:
    """Many engines as one; `core.protocols.Engine`."""

    def __init__(
        self,
        engines: Sequence[Engine] = (),
        *,
        policy: str | OrderPolicy = "longest_first",
        slots: int = 256,
        max_tries: int = 8,
        patience_s: float = 600.0,
    ) -> None:
        """Take the engines; more may join.

        Args:
            engines: The servers, all with the same model.
            policy: Who goes next and where: a name of `order.policies`, or a policy.
            slots: Requests on each server at once; more wait here, in order.
            max_tries: How often one request may be lost before it fails.
            patience_s: How long a request waits while no server is up.
        """
        if slots < 1 or max_tries < 1:
            raise ConfigError(f"slots is {slots} and max_tries is {max_tries}; both are at least 1")
        self._policy = make_policy(policy)
        self._slots = slots
        self._max_tries = max_tries
        self._patience_s = patience_s
        self._replicas: list[Replica] = []
        self._homes: dict[str, Replica] = {}
        self._live: dict[str, _Waiting] = {}
        self._version = 0
        self._num_made = 0
        self._num_waiting = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.num_lost = 0
        """Requests that were lost with their server and asked of another one."""
        self.num_stale = 0
        """Answers that were dropped because the server had gone back to older weights."""
        self.num_moved = 0
        """Turns that were sent to another server than the one that has their prefix."""
        for engine in engines:
            self.join(engine)

    # Who is in it.

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The servers, those that are down included."""
        return tuple(self._replicas)

    def join(self, engine: Engine, *, name: str | None = None, version: int | None = None) -> Replica:
        """Add a server; it gets work at once if it serves the pool's weights, else after the next update.

        Args:
            engine: The server.
            name: Shown in the log.
            version: The policy version that it serves; the pool's own by default.
        """
        self._num_made += 1
        replica = Replica(
            engine, name or f"replica {self._num_made - 1}", self._num_made - 1, self._slots, version=self._version
        )
        replica.is_stale = version is not None and version < self._version
        self._replicas.append(replica)
        if self._num_waiting:
            self._admit()
        return replica

    def leave(self, replica: Replica) -> None:
        """Send `replica` nothing more; what runs there ends there. The caller closes its engine."""
        replica.is_leaving = True
        self._replicas = [other for other in self._replicas if other is not replica]
        self._homes = {session: home for session, home in self._homes.items() if home is not replica}

    # core.protocols.Engine.

    @property
    def capabilities(self) -> EngineCapabilities:
        """What every one of its servers can do."""
        all_of = [replica.engine.capabilities for replica in self._replicas]
        if not all_of:
            return EngineCapabilities()
        contexts = [one.max_context for one in all_of if one.max_context is not None]
        return EngineCapabilities(
            seeded=all(one.seeded for one in all_of),
            logprobs=all(one.logprobs for one in all_of),
            media=all(one.media for one in all_of),
            pause_modes=tuple(m for m in all_of[0].pause_modes if all(m in one.pause_modes for one in all_of)),
            max_context=min(contexts, default=None),
        )

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion, on whichever server.

        Raises:
            EngineLostError: it was lost too often, or no server came back in time.
            EngineError: a server refused it.
        """
        if self._is_closed:
            raise EngineError(f"request {request.request_id!r} came after the pool was closed")
        if request.request_id in self._live:
            raise EngineError(f"request id {request.request_id!r} is in use")
        loop = asyncio.get_running_loop()
        self._policy.predictor.arrived(request, now=loop.time())
        problems: list[str] = []
        try:
            while len(problems) < self._max_tries:
                waiting = self._live[request.request_id] = _Waiting(request, loop.time(), loop.create_future())
                replica = await self._placed(waiting)
                if replica is None:
                    return _nothing(self._version)
                try:
                    completion = await self._ask(replica, waiting)
                except EngineLostError as problem:
                    problems.append(f"{replica.name}: {one_line(problem)}")
                    continue
                if completion is not None:
                    self._policy.predictor.answered(request, now=loop.time())
                    return completion
                problems.append(f"{replica.name}: served older weights")
        finally:
            self._live.pop(request.request_id, None)
        raise EngineLostError(
            f"request {request.request_id!r} was lost {len(problems)} times: {'; '.join(sorted(set(problems)))}"
        )

    async def abort(self, request_id: str) -> None:
        """End a request now, whether it waits or runs."""
        waiting = self._live.get(request_id)
        if waiting is None:
            return
        waiting.is_aborted = True
        if not waiting.place.done():
            waiting.place.cancel()
        elif not waiting.place.cancelled():
            await waiting.place.result().engine.abort(request_id)

    async def end_session(self, session_id: str) -> None:
        """Forget where an episode ran, and learn from how long it took."""
        self._policy.predictor.ended(session_id)
        home = self._homes.pop(session_id, None)
        if home is not None and home.is_up:
            await home.engine.end_session(session_id)

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Bring all servers to `version`; one that is lost meanwhile stays out until the next update.

        Raises:
            EngineError: a server refused, or none is left.
        """

        async def push(replica: Replica) -> None:
            try:
                await replica.engine.update_weights(version, weights=weights)
            except EngineLostError as problem:
                replica.is_stale = True
                self._down(replica, problem)
                return
            replica.version, replica.is_stale = version, False
            self._up(replica)

        with first_error():
            async with asyncio.TaskGroup() as tasks:
                for replica in self._replicas:
                    tasks.create_task(push(replica))
        if all(replica.is_stale for replica in self._replicas):
            raise EngineLostError(f"none of the {len(self._replicas)} servers took policy version {version}")
        self._version = version
        self._admit()

    async def close(self) -> None:
        """Close all servers."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        async with asyncio.TaskGroup() as tasks:
            for replica in self._replicas:
                tasks.create_task(replica.engine.close())

    # Placing.

    async def _placed(self, waiting: _Waiting) -> Replica | None:
        """Wait for a server; None once the request was aborted."""
        self._policy.push(waiting)
        self._num_waiting += 1
        self._admit()
        deadline, loop = waiting.request.deadline, asyncio.get_running_loop()
        try:
            if waiting.place.done():
                return waiting.place.result()
            async with asyncio.timeout_at(deadline):
                return await waiting.place
        except TimeoutError:
            self._withdraw(waiting)
            return None
        except asyncio.CancelledError:
            self._withdraw(waiting)
            task = asyncio.current_task()
            if waiting.is_aborted and (task is None or not task.cancelling()):
                return None
            raise
        finally:
            waited = loop.time() - waiting.arrived
            self._policy.predictor.admitted(waiting.request, waited_s=waited)

    def _withdraw(self, waiting: _Waiting) -> None:
        """Take a request that nobody waits for out of the queue, or off the place that it was just given."""
        if waiting.place.done() and not waiting.place.cancelled() and waiting.place.exception() is None:
            self._free(waiting.place.result(), waiting)
        elif not waiting.is_gone:
            waiting.is_gone = True
            self._num_waiting -= 1

    def _admit(self) -> None:
        """Give free places to those who wait, in the policy's order."""
        now = asyncio.get_running_loop().time() if self._num_waiting else 0.0
        while self._num_waiting:
            free = [replica for replica in self._replicas if replica.takes_work(now)]
            if not free:
                break
            waiting = self._policy.pop()
            if waiting is None:
                break
            assert isinstance(waiting, _Waiting)
            self._num_waiting -= 1
            waiting.is_gone = True
            if waiting.place.done():
                continue
            session = waiting.request.session_id
            home = self._homes.get(session)
            chosen = self._policy.place(home if home in free else None, free)
            assert isinstance(chosen, Replica)
            self.num_moved += home is not None and home is not chosen
            self._homes[session] = chosen
            chosen.running[waiting.request.request_id] = waiting
            waiting.place.set_result(chosen)
        if self._num_waiting and not any(replica.is_up and not replica.is_stale for replica in self._replicas):
            self._look_again(now)

    def _look_again(self, now: float) -> None:
        """Set a timer for the next server that may be tried; give up on those that have waited too long."""
        for waiting in list(self._live.values()):
            if not waiting.place.done() and now - waiting.arrived >= self._patience_s:
                waiting.is_gone = True
                self._num_waiting -= 1
                waiting.place.set_exception(EngineLostError(f"no server was up for {self._patience_s:g} s"))
        if self._timer is None and self._num_waiting:
            self._timer = asyncio.get_running_loop().call_later(_FIRST_RETRY_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._admit()

    async def _ask(self, replica: Replica, waiting: _Waiting) -> Completion | None:
        """Ask `replica`; None where it answered with older weights than it had."""
        request, before = waiting.request, replica.version
        priority = self._policy.priority(request)
        if priority != request.priority:
            request = dataclasses.replace(request, priority=priority)
        try:
            completion = await replica.engine.generate(request)
        except EngineLostError as problem:
            self.num_lost += 1
            replica.num_lost += 1
            self._down(replica, problem)
            raise
        finally:
            self._free(replica, waiting)
        if completion.policy_versions[-1][1] < before:
            self.num_stale += 1
            if not replica.is_stale:
                replica.is_stale = True
                logger.warning(
                    "%s answers with policy version %d after it had %d: it was restarted, and gets no work before the next "
                    "weights",
                    replica.name,
                    completion.policy_versions[-1][1],
                    before,
                )
            return None
        replica.num_done += 1
        self._up(replica)
        return completion

    def _free(self, replica: Replica, waiting: _Waiting) -> None:
        if replica.running.get(waiting.request.request_id) is waiting:
            del replica.running[waiting.request.request_id]
        self._admit()

    def _down(self, replica: Replica, problem: EngineError) -> None:
        """Leave `replica` out for a while; each time longer."""
        now = asyncio.get_running_loop().time()
        if replica.is_up or now >= replica.probes_at:
            replica.probes_at = now + replica.pause_s
            logger.warning(
                "%s is lost (%s); its %d requests go elsewhere, and it is tried again in %.0f s",
                replica.name,
                one_line(problem),
                len(replica.running),
                replica.pause_s,
            )
            replica.pause_s = min(2 * replica.pause_s, _LAST_RETRY_S)
            asyncio.get_running_loop().call_later(replica.pause_s / 2, self._admit)
        replica.is_up = False

    def _up(self, replica: Replica) -> None:
        if not replica.is_up:
            logger.info("%s is back", replica.name)
            replica.is_up, replica.pause_s = True, _FIRST_RETRY_S
            self._admit()


def _nothing(version: int) -> Completion:
    """Return what a request has that was ended before it was sent."""
    return Completion(token_ids=[], logprobs=[], finish_reason=FinishReason.ABORT, policy_versions=((0, version),))  # type: ignore[arg-type]
