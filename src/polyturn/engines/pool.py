"""EnginePool: several servers as one `Engine`, which admits requests in order of arrival and repeats lost ones.

A request waits until a server has a free slot (`admission.py`). If a server is lost (`EngineLostError`), its requests are
sent to another one. A request contains the whole prompt, so only the current turn is sampled again, and only one answer is
ever returned: tokens are never trained twice. `recovery.py` brings the server back.

If an answer comes from other weights than the pool sent (the server was restarted, or another client changed its weights),
the pool drops it and sends the request to another server. The first server is used again once it has the right weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from polyturn.core.continuation import nothing
from polyturn.core.errors import ConfigError, EngineError, EngineGoneError, EngineLostError, one_line
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.core.protocols import Engine, EngineCapabilities, EngineLoad, LoadedEngine
from polyturn.engines.admission import Admission
from polyturn.engines.base import BaseEngine, common_capabilities
from polyturn.engines.recovery import CurrentWeights, PoolWeights, Revivable, Sleeper, Verify, Watched, recover
from polyturn.engines.replica import FIRST_RETRY_S, LAST_RETRY_S, Outage, PooledRequest, PoolUse, Replica, reasons
from polyturn.engines.weights.folder import ServerWeights, WeightStore
from polyturn.infra.aio import first_error

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
WATCH_S = 5.0
"""Seconds between two checks of a server that other processes send requests to."""


class EnginePool(BaseEngine):
    """Several engines as one; implements `core.protocols.Engine`."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        names: Sequence[str] | None = None,
        slots: int = 256,
        max_tries: int = 8,
        patience_s: float = 600.0,
        files: WeightStore | None = None,
        recovery_s: float = 600.0,
    ) -> None:
        """Make a pool of `engines`.

        Args:
            engines: The servers, all with the same model.
            names: Their names in logs; None numbers them.
            slots: Maximum number of concurrent requests on each server; further ones wait here, in order.
            max_tries: Number of times that a request is sent before it fails, because every attempt was lost with its server
                or answered from other weights.
            patience_s: Seconds that a request waits while no server is up.
            files: Writes weights for all servers, and may keep them for a server that comes back; without it, each engine
                gets the weights directly. If they are not kept, a server that lost its weights gets the trainer's, from
                `current`, or stays out until the next update.
            recovery_s: Seconds that sending a server its weights again, and verifying them, may take.
        """
        super().__init__()
        if slots < 1 or max_tries < 1:
            raise ConfigError(f"slots is {slots} and max_tries is {max_tries}; both must be at least 1")
        self._max_tries = max_tries
        self._patience_s = patience_s
        self.replicas = tuple(
            Replica(engine, f"replica {number}" if names is None else names[number], slots)
            for number, engine in enumerate(engines)
        )
        """All servers, including those that are down."""
        self.admission = Admission(self.replicas, patience_s=patience_s)
        """The queue of requests, and the servers' slots."""
        self._live: dict[str, PooledRequest] = {}
        self._files = files
        self._recovery_s = recovery_s
        self._served = PoolWeights(0, None)
        self._coming = 0
        """The policy version that is being pushed, or else the served version."""
        self._is_pushing = False
        self._reported: dict[str, float] = {}
        self._outage = Outage(self.replicas, patience_s=patience_s)
        self.verify: Verify | None = None
        """Checks that a recovered server serves the pool's weights."""
        self.current: CurrentWeights | None = None
        """Provides the trainer's weights for a recovered server, if `files` does not keep weights."""
        self.on_change: Callable[[], object] = lambda: None
        """Called when a server is lost or comes back, and when an update begins or ends."""
        self.is_held = False
        """Whether the workers that send requests to the servers directly hold them back; see `UpdateGate`."""
        self.uses: dict[str, PoolUse] = {}
        """The latest report of each worker that sends requests to the servers directly, by the worker's name."""
        self._is_asleep = False
        self._is_closed = False
        self.num_lost = 0
        """Number of times that a request was lost with its server."""
        self.num_stale = 0
        """Number of answers that were dropped because they came from other weights than the pool's."""
        self.num_redone = 0
        """Number of requests that were answered after an earlier attempt was lost, or dropped for its weights."""

    # Servers.

    @property
    def served_version(self) -> int:
        """The policy version that the pool serves."""
        return self._served.version

    @property
    def is_open(self) -> bool:
        """Whether requests may be sent: false during a weight update and while the servers sleep."""
        return not (self._is_pushing or self._is_asleep)

    # core.protocols.Engine.

    @property
    def capabilities(self) -> EngineCapabilities:
        """The capabilities that all servers have."""
        return common_capabilities([replica.engine.capabilities for replica in self.replicas])

    @property
    def load(self) -> EngineLoad:
        """The number of waiting requests, here and on the servers, and the KV cache use of the fullest server."""
        engines = [replica.engine for replica in self.replicas if replica.is_live]
        loads = [one.load for one in engines if isinstance(one, LoadedEngine)]
        queue = self.admission.queue.value + sum(load.queue for load in loads if load is not None)
        return EngineLoad(queue, max((load.kv_use for load in loads if load is not None), default=0.0))

    @property
    def busy_s(self) -> float:
        """Seconds with at least one running request: in this process or, if larger, the mean over the workers that send
        requests directly."""
        of_workers = [use.busy_s for use in self.uses.values()]
        return max(super().busy_s, sum(of_workers) / max(1, len(of_workers)))

    def use_totals(self) -> dict[str, float]:
        """Return the request counters of this process so far."""
        return {
            "engine/lost": self.num_lost,
            "engine/redone": self.num_redone,
            "engine/stale": self.num_stale,
            "engine/moved": self.admission.num_moved,
        }

    def read_metrics(self) -> dict[str, float]:
        """Return the number of servers, and the request counts since the last call."""
        totals = Counter(self.use_totals())
        for use in self.uses.values():
            totals.update(use.totals)
        totals["engine/restarts"] = sum(r.engine.num_restarts for r in self.replicas if isinstance(r.engine, Revivable))
        new = {name: total - self._reported.get(name, 0) for name, total in totals.items()}
        self._reported.update(totals)
        return {
            "engine/replicas": len(self.replicas),
            "engine/replicas_live": sum(replica.is_live for replica in self.replicas),
            **new,
            **self._read_load(),
        }

    def _read_load(self) -> dict[str, float]:
        """Return the number of waiting requests, here and on the servers, and the use of the servers' KV caches."""
        loads = [replica.engine.read_metrics() for replica in self.replicas]
        waited = [self.admission.queue.read(), *(use.queue for use in self.uses.values())]
        waited += [one["engine/queue"] for one in loads if "engine/queue" in one]
        used = [one["engine/kv_use"] for one in loads if "engine/kv_use" in one]
        return {"engine/queue": sum(waited)} | ({"engine/kv_use": sum(used) / len(used)} if used else {})

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion on one of the servers.

        Raises:
            EngineLostError: the request was lost too often, or no server came back in time.
            EngineError: a server refused the request.
        """
        if request.request_id in self._live:
            raise EngineError(f"request id {request.request_id!r} is in use")
        loop = asyncio.get_running_loop()
        problems: list[str] = []
        try:
            with self.busy.running():
                while len(problems) < self._max_tries:
                    if self._is_closed:
                        raise EngineError(f"request {request.request_id!r} needs a server after the pool was closed")
                    waiting = self._live[request.request_id] = PooledRequest(request, loop.time(), loop.create_future())
                    replica = await self.admission.place(waiting)
                    if replica is None:
                        return nothing(self._served.version)
                    try:
                        completion = await self._ask(replica, waiting)
                        problem = "answered with other weights than the pool's"
                    except EngineLostError as lost:
                        completion, problem = None, one_line(lost)
                    if completion is not None:
                        self.num_redone += bool(problems)
                        return completion
                    if waiting.is_aborted:
                        return nothing(self._served.version)
                    problems.append(f"{replica.name}: {problem}")
        finally:
            self._live.pop(request.request_id, None)
        times = f"{len(problems)} time{'s' * (len(problems) != 1)}"
        raise EngineLostError(f"request {request.request_id!r} was lost {times}: {'; '.join(sorted(set(problems)))}")

    async def abort(self, request_id: str) -> None:
        """End a request now, whether it waits or runs."""
        waiting = self._live.get(request_id)
        if waiting is None:
            return
        waiting.is_aborted = True
        if not waiting.assigned.done():
            waiting.assigned.cancel()
        elif not waiting.assigned.cancelled() and waiting.assigned.exception() is None:
            await waiting.assigned.result().engine.abort(request_id)

    async def end_session(self, session_id: str) -> None:
        """Drop the assignment of an episode to a server, and end the episode's session on that server."""
        home = self.admission.forget(session_id)
        if home is not None and home.is_up:
            await home.engine.end_session(session_id)

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Update all servers to `version`; a server that is lost during the update gets the weights when it comes back.

        Raises:
            EngineError: a server refused the weights, or no server is left.
        """
        payload: Any = weights
        if weights is not None and self._files is not None:
            payload = await asyncio.to_thread(self._files.write, weights)
        keeps = self._files is not None and self._files.keeps
        is_kept = weights is not None and keeps
        can_return = is_kept or (weights is not None and self._files is not None and self.current is not None)
        self._coming, self._is_pushing, self._is_asleep = version, True, False
        self.on_change()
        began, running = time.perf_counter(), sum(len(replica.running) for replica in self.replicas)
        problems: list[str] = []

        async def push(replica: Replica) -> None:
            try:
                await replica.engine.update_weights(version, weights=payload)
            except EngineLostError as problem:
                problems.append(f"{replica.name}: {one_line(problem)}")
                self.exclude(replica, problem)
                return
            replica.version, replica.is_stale = version, False
            if replica.recovery is not None:
                replica.recovery.cancel()
                replica.recovery = None
            self._up(replica)

        try:
            with first_error():
                async with asyncio.TaskGroup() as tasks:
                    for replica in self.replicas:
                        if not replica.is_gone and (replica.recovery is None or not keeps):
                            tasks.create_task(push(replica))
                        else:
                            replica.is_stale = True  # it gets the weights when it is back
            if can_return:  # set before awaiting servers, so that a server that returns meanwhile gets these weights
                self._served = PoolWeights(version, payload if is_kept else None)
            self._is_pushing = False
            if not any(replica.is_live for replica in self.replicas) and not (can_return and await self._one_is_live()):
                problems = problems or [f"all are lost ({reasons(self.replicas)})"]
                raise EngineLostError(
                    f"none of the {len(self.replicas)} servers took policy version {version}: {'; '.join(problems)}"
                )
            if not can_return and (weights is not None or version != self._served.version):
                self._served = PoolWeights(version, None)
        finally:
            self._coming, self._is_pushing = self._served.version, False
            self.on_change()
            if isinstance(payload, ServerWeights):
                await payload.settle()  # also after a failure
        logger.debug(
            "policy version %d reached %d of %d servers within %.2f s; %d running requests continue with it",
            version,
            sum(replica.is_live for replica in self.replicas),
            len(self.replicas),
            time.perf_counter() - began,
            running,
        )
        self.admission.admit()

    async def sleep(self) -> None:
        """Let every server release its GPU memory until the next weight update wakes it; requests wait until then.

        Raises:
            EngineError: a server refused.
        """
        self._is_asleep = True
        self.on_change()
        # A server that starts now would occupy the memory; the next update starts its recovery again.
        await self._cancel_recoveries()
        with first_error():
            async with asyncio.TaskGroup() as tasks:
                for replica in self.replicas:
                    replica.recovery = None
                    if isinstance(replica.engine, Sleeper) and not replica.is_gone:
                        tasks.create_task(replica.engine.sleep())

    async def _one_is_live(self) -> bool:
        """Wait for a server to come back; return whether one did in time."""
        loop = asyncio.get_running_loop()
        limit = loop.time() + self._patience_s
        while loop.time() < limit and not all(replica.is_gone for replica in self.replicas):
            if any(replica.is_live for replica in self.replicas):
                return True
            await asyncio.sleep(_LOOK_S)
        return False

    def exclude(self, replica: Replica, problem: EngineError) -> None:
        """Send `replica` no requests until it has the pool's weights again, and start its recovery."""
        replica.is_stale = True
        self._down(replica, problem)

    async def start(self) -> None:
        """Start the servers that other processes send requests to. If one does not answer, recover it in the background.

        Raises:
            EngineError: a server cannot be started, or does not fit the run.
        """

        async def start_one(replica: Replica, engine: Watched) -> None:
            try:
                await engine.start()
            except EngineLostError as problem:
                self._down(replica, problem)

        with first_error():
            async with asyncio.TaskGroup() as tasks:
                for replica in self.replicas:
                    if replica.is_live and isinstance(replica.engine, Watched):
                        tasks.create_task(start_one(replica, replica.engine))

    async def watch(self, replica: Replica) -> None:
        """Check a server that other processes send requests to, until cancelled, and recover it when it is lost."""
        while isinstance(replica.engine, Watched):
            await asyncio.sleep(WATCH_S)
            epoch = replica.epoch
            try:
                if replica.is_live and self.is_open:
                    await replica.engine.look()
            except EngineError as problem:
                if replica.is_live and epoch == replica.epoch:
                    self._down(replica, problem)

    async def close(self) -> None:
        """Fail waiting requests, and close all servers, also if closing one of them fails."""
        self._is_closed = True
        self.admission.close()
        await self._cancel_recoveries()
        ends = await asyncio.gather(*(replica.engine.close() for replica in self.replicas), return_exceptions=True)
        if self._files is not None:
            self._files.close()
        for problem in ends:
            if problem is not None:
                raise problem

    async def _cancel_recoveries(self) -> None:
        recoveries = [replica.recovery for replica in self.replicas if replica.recovery is not None]
        for recovery in recoveries:
            recovery.cancel()
        if recoveries:
            await asyncio.wait(recoveries)

    # One request.

    async def _ask(self, replica: Replica, waiting: PooledRequest) -> Completion | None:
        """Send a request to `replica`; return None if the answer comes from other weights than the pool's."""
        request, before, epoch = waiting.request, replica.version, replica.epoch
        try:
            completion = await replica.engine.generate(request)
        except EngineLostError as problem:
            self.num_lost += 1
            if epoch == replica.epoch:
                self._down(replica, problem)
            raise
        finally:
            self.admission.free(replica, waiting)
        versions = [version for _, version in completion.policy_versions]
        if not all(before <= version <= max(self._coming, replica.version) for version in versions):
            self.num_stale += 1
            if epoch == replica.epoch and not replica.is_stale:
                self.exclude(replica, EngineError(f"it answers as policy version {versions[-1]} and was sent {before}"))
            return None
        replica.num_done += 1
        if epoch == replica.epoch:
            self._up(replica)
        return completion

    # One server.

    def _down(self, replica: Replica, problem: EngineError) -> None:
        """Mark `replica` as down, and start its recovery."""
        loop = asyncio.get_running_loop()
        if replica.is_up or loop.time() >= replica.probes_at:
            replica.epoch += 1
            replica.probes_at = loop.time() + replica.pause_s
            loop.call_later(replica.pause_s, self.admission.admit)  # there may be no answer that checks the queue
            logger.warning(
                "%s is left out (%s); %d requests run there, and those that fail are sent to another server",
                replica.name,
                one_line(problem),
                len(replica.running),
            )
            replica.pause_s = min(2 * replica.pause_s, LAST_RETRY_S)
        replica.is_up = False
        self._outage.note(replica, problem)
        self._bring_back(replica)
        self.on_change()

    def _up(self, replica: Replica) -> None:
        if not replica.is_up and replica.recovery is None:
            logger.info("%s is back", replica.name)
            replica.is_up, replica.pause_s = True, FIRST_RETRY_S
            self._outage.end(replica)
            self.admission.admit()
            self.on_change()

    def _bring_back(self, replica: Replica) -> None:
        """Start the recovery of `replica`, if its engine supports it (`Revivable`)."""
        is_for_later = self._is_closed or self._is_asleep
        if isinstance(replica.engine, Revivable) and replica.recovery is None and not (replica.is_gone or is_for_later):
            replica.recovery = asyncio.create_task(self._recover(replica, replica.engine), name=f"recover {replica.name}")

    @asynccontextmanager
    async def _again(self, served: PoolWeights) -> AsyncIterator[Any]:
        """Provide the served weights for one server: the kept ones, or else the trainer's, which do not change inside the
        block."""
        if served.weights is not None:
            yield served.weights
            return
        if self.current is None or self._files is None:
            raise EngineError(f"policy version {served.version} is not kept; a server that does not serve it gets the next")
        async with self.current(served.version) as weights:
            payload = self._files.write(weights)
            try:
                yield payload
            finally:
                await payload.settle()

    async def _recover(self, replica: Replica, engine: Revivable) -> None:
        def on_back(served: PoolWeights) -> bool:
            if self._is_pushing or served is not self._served:
                return False
            replica.version, replica.is_stale, replica.is_up = served.version, False, True
            replica.pause_s, replica.recovery = FIRST_RETRY_S, None
            self._outage.end(replica)
            self.admission.admit()
            self.on_change()
            return True

        try:
            await recover(
                replica,
                engine,
                served=lambda: self._served,
                again=self._again,
                verify=lambda: self.verify,
                on_back=on_back,
                on_failure=lambda problem: self._outage.note(replica, problem),
                attempt_s=self._recovery_s,
            )
        except Exception as problem:  # whatever the error is, the recovery is over: do not wait for the server
            replica.is_gone, replica.recovery, replica.why = True, None, one_line(problem)
            left = sum(not other.is_gone for other in self.replicas)
            trace = None if isinstance(problem, EngineGoneError) else problem
            message = "%s is out for good (%s); %d servers are left"
            logger.error(message, replica.name, one_line(problem), left, exc_info=trace)
            self.admission.admit()
            self.on_change()
