"""EnginePool: many servers behind one `Engine`, which admits requests in the order of arrival and repeats what is lost.

A request waits until a server has a place (`admission.py`). What a lost server (`EngineLostError`) held is asked of another
one. A request holds the whole prompt, so that the turn is done again from its last complete turn, and only one answer of it
is ever returned: no token is trained twice. The server itself is brought back by `recovery.py`.

An answer from weights that the server was not given (it was restarted, or another client changed them) is dropped, asked of
another one, and the server serves again once it has the right ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from polyturn.core.aio import first_error
from polyturn.core.continuation import nothing
from polyturn.core.errors import ConfigError, EngineError, EngineGoneError, EngineLostError, one_line
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.core.protocols import Engine, EngineCapabilities, EngineLoad, LoadedEngine
from polyturn.engines.admission import Admission
from polyturn.engines.base import BaseEngine, common_capabilities
from polyturn.engines.recovery import CurrentWeights, PoolWeights, Revivable, Sleeper, Verify, Watched, recover
from polyturn.engines.replica import FIRST_RETRY_S, LAST_RETRY_S, Outage, PooledRequest, PoolUse, Replica, reasons
from polyturn.engines.weight_files import ServerWeights, WeightStore

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
WATCH_S = 5.0
"""Seconds between two looks at a server that other processes ask."""


def nothing_to_tell() -> None:
    """Take a change of a pool that no other process follows."""


class EnginePool(BaseEngine):
    """Many engines as one; `core.protocols.Engine`."""

    def __init__(
        self,
        engines: Sequence[Engine] = (),
        *,
        slots: int = 256,
        max_tries: int = 8,
        patience_s: float = 600.0,
        files: WeightStore | None = None,
        recovery_s: float = 600.0,
    ) -> None:
        """Take the engines; more may join.

        Args:
            engines: The servers, all with the same model.
            slots: Requests on each server at once; more wait here, in order.
            max_tries: How often one request may be lost before it fails.
            patience_s: How long a request waits while no server is up.
            files: Brings weights to all servers, and may keep them for one that comes back; without it each engine gets
                them as they are. Where they are not kept, a server that forgot them gets the trainer's, from `current`, or
                stays out until the next ones.
            recovery_s: How long sending a server its weights again, and verifying them, may take.
        """
        super().__init__()
        if slots < 1 or max_tries < 1:
            raise ConfigError(f"slots is {slots} and max_tries is {max_tries}; both are at least 1")
        self._slots = slots
        self._max_tries = max_tries
        self._patience_s = patience_s
        self._replicas: list[Replica] = []
        self.admission = Admission(self._replicas, patience_s=patience_s)
        """The queue, and the places of requests."""
        self._live: dict[str, PooledRequest] = {}
        self._files = files
        self._recovery_s = recovery_s
        self._served = PoolWeights(0, None)
        self._num_updates = 0
        self._coming = 0
        """The policy version that is being pushed, else the one that is served."""
        self._is_pushing = False
        self._reported: dict[str, float] = {}
        self._outage = Outage(self._replicas, patience_s=patience_s)
        self.verify: Verify | None = None
        """Proves that a server that was brought back serves the pool's weights."""
        self.current: CurrentWeights | None = None
        """Gives a server that was brought back the trainer's weights, where `files` keeps none."""
        self.on_change: Callable[[], object] = nothing_to_tell
        """Called when a server is lost or comes back, and when an update begins or ends."""
        self.uses: dict[str, PoolUse] = {}
        """The latest report of each worker that asks the servers by itself."""
        self._num_made = 0
        self._is_asleep = False
        self._is_closed = False
        self.num_lost = 0
        """Requests that were lost with their server and asked of another one."""
        self.num_stale = 0
        """Answers that were dropped because the server had gone back to older weights."""
        self.num_redone = 0
        """Requests that were answered after they had been lost."""
        for engine in engines:
            self.join(engine)

    # Who is in it.

    @property
    def served_version(self) -> int:
        """The policy version that the pool serves."""
        return self._served.version

    @property
    def is_open(self) -> bool:
        """Whether requests may be sent: false while the weights change, and while the servers sleep."""
        return not (self._is_pushing or self._is_asleep)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The servers, those that are down included."""
        return tuple(self._replicas)

    def join(self, engine: Engine, *, name: str | None = None, version: int | None = None) -> Replica:
        """Add a server. It gets work at once if it serves the pool's weights, else once it was given them.

        Args:
            engine: The server.
            name: Shown in the log.
            version: The policy version that it serves; by default the pool's own, or, of a server that can be asked how it
                is and joins after weights were sent, an unknown one.
        """
        self._num_made += 1
        replica = Replica(
            engine, name or f"replica {self._num_made - 1}", self._num_made - 1, self._slots, version=self._served.version
        )
        is_new = isinstance(engine, Revivable) and self._num_updates > 0
        replica.is_stale = is_new if version is None else version < self._served.version
        if replica.is_stale:
            self._bring_back(replica)
        self._replicas.append(replica)
        self.admission.admit()
        return replica

    def leave(self, replica: Replica) -> None:
        """Send `replica` nothing more; what runs there ends there. The caller closes its engine."""
        replica.is_leaving = True
        if replica.recovery is not None:
            replica.recovery.cancel()
        self.admission.remove(replica)

    # core.protocols.Engine.

    @property
    def capabilities(self) -> EngineCapabilities:
        """Capabilities that every one of its servers has."""
        return common_capabilities([replica.engine.capabilities for replica in self._replicas])

    @property
    def load(self) -> EngineLoad:
        """The waiting requests, here and on the servers together, and the use of the fullest server's KV cache."""
        engines = [replica.engine for replica in self._replicas if replica.is_live]
        loads = [one.load for one in engines if isinstance(one, LoadedEngine)]
        queue = self.admission.queue.value + sum(load.queue for load in loads if load is not None)
        return EngineLoad(queue, max((load.kv_use for load in loads if load is not None), default=0.0))

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one request was being answered; of workers that ask by themselves, their mean."""
        of_workers = [use.busy_s for use in self.uses.values()]
        return max(super().busy_s, sum(of_workers) / max(1, len(of_workers)))

    def use_totals(self) -> dict[str, float]:
        """Return the counts of this process's requests so far."""
        return {
            "engine/lost": self.num_lost,
            "engine/redone": self.num_redone,
            "engine/stale": self.num_stale,
            "engine/moved": self.admission.num_moved,
        }

    def read_metrics(self) -> dict[str, float]:
        """Return the number of servers, and the counts of requests since the last call."""
        totals = Counter(self.use_totals())
        for use in self.uses.values():
            totals.update(use.totals)
        totals["engine/restarts"] = sum(r.engine.num_restarts for r in self._replicas if isinstance(r.engine, Revivable))
        new = {name: total - self._reported.get(name, 0) for name, total in totals.items()}
        self._reported.update(totals)
        return {
            "engine/replicas": len(self._replicas),
            "engine/replicas_live": sum(replica.is_live for replica in self._replicas),
            **new,
            **self._read_load(),
        }

    def _read_load(self) -> dict[str, float]:
        """Return the number of waiting requests, here and on the servers together, and the use of the servers' KV caches."""
        loads = [replica.engine.read_metrics() for replica in self._replicas]
        waited = [self.admission.queue.read(), *(use.queue for use in self.uses.values())]
        waited += [one["engine/queue"] for one in loads if "engine/queue" in one]
        used = [one["engine/kv_use"] for one in loads if "engine/kv_use" in one]
        return {"engine/queue": sum(waited)} | ({"engine/kv_use": sum(used) / len(used)} if used else {})

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
        problems: list[str] = []
        try:
            with self.busy.running():
                while len(problems) < self._max_tries:
                    waiting = self._live[request.request_id] = PooledRequest(request, loop.time(), loop.create_future())
                    replica = await self.admission.place(waiting)
                    if replica is None:
                        return nothing(self._served.version)
                    try:
                        completion = await self._ask(replica, waiting)
                    except EngineLostError as problem:
                        problems.append(f"{replica.name}: {one_line(problem)}")
                        continue
                    if completion is not None:
                        self.num_redone += bool(problems)
                        return completion
                    problems.append(f"{replica.name}: served other weights than it was given")
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
        if not waiting.assigned.done():
            waiting.assigned.cancel()
        elif not waiting.assigned.cancelled():
            await waiting.assigned.result().engine.abort(request_id)

    async def end_session(self, session_id: str) -> None:
        """Forget where an episode ran."""
        home = self.admission.forget(session_id)
        if home is not None and home.is_up:
            await home.engine.end_session(session_id)

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Bring all servers to `version`; one that is lost meanwhile follows when it is back.

        Raises:
            EngineError: a server refused, or none is left.
        """
        payload: Any = weights
        if weights is not None and self._files is not None:
            payload = await asyncio.to_thread(self._files.write, weights)
        keeps = self._files is not None and self._files.keeps
        is_kept = weights is not None and keeps
        can_return = is_kept or (weights is not None and self._files is not None and self.current is not None)
        self._coming, self._is_pushing, self._is_asleep = version, True, False
        self._num_updates += 1
        self.on_change()
        began, running = time.perf_counter(), sum(len(replica.running) for replica in self._replicas)
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
                    for replica in self._replicas:
                        if not replica.is_gone and (replica.recovery is None or not keeps):
                            tasks.create_task(push(replica))
                        else:
                            replica.is_stale = True  # it gets them when it is back
            if can_return:  # before servers are awaited: one that returns gets these
                self._served = PoolWeights(version, payload if is_kept else None)
            self._is_pushing = False
            if not any(replica.is_live for replica in self._replicas) and not (can_return and await self._one_is_live()):
                problems = problems or [f"all are lost ({reasons(self._replicas)})"]
                raise EngineLostError(
                    f"none of the {len(self._replicas)} servers took policy version {version}: {'; '.join(problems)}"
                )
            if not can_return and (weights is not None or version != self._served.version):
                self._served = PoolWeights(version, None)
        finally:
            self._coming, self._is_pushing = self._served.version, False
            self.on_change()
            if isinstance(payload, ServerWeights):
                await payload.settle()  # also after a failure
        logger.debug(
            "policy version %d reached %d of %d servers within %.2f s; %d requests that ran there go on with it",
            version,
            sum(replica.is_live for replica in self._replicas),
            len(self._replicas),
            time.perf_counter() - began,
            running,
        )
        self.admission.admit()

    async def sleep(self) -> None:
        """Let every server give back the memory of its GPUs until the next weights, which wake it; requests wait meanwhile.

        Raises:
            EngineError: one refused.
        """
        self._is_asleep = True
        self.on_change()
        # A server that starts meanwhile would take the memory; it is brought back once the weights find it down.
        await self._cancel_recoveries()
        with first_error():
            async with asyncio.TaskGroup() as tasks:
                for replica in self._replicas:
                    replica.recovery = None
                    if isinstance(replica.engine, Sleeper) and not replica.is_gone:
                        tasks.create_task(replica.engine.sleep())

    async def _one_is_live(self) -> bool:
        """Wait for a server to come back; return false where none does in time."""
        loop = asyncio.get_running_loop()
        limit = loop.time() + self._patience_s
        while loop.time() < limit and not all(replica.is_gone for replica in self._replicas):
            if any(replica.is_live for replica in self._replicas):
                return True
            await asyncio.sleep(_LOOK_S)
        return False

    def exclude(self, replica: Replica, problem: EngineError) -> None:
        """Send `replica` nothing before it was given the pool's weights again."""
        replica.is_stale = True
        self._down(replica, problem)

    async def watch(self, replica: Replica) -> None:
        """Look at a server that other processes ask, until cancelled, and bring it back when it is lost."""
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
        """Close all servers."""
        self._is_closed = True
        self.admission.close()
        await self._cancel_recoveries()
        async with asyncio.TaskGroup() as tasks:
            for replica in self._replicas:
                tasks.create_task(replica.engine.close())
        if self._files is not None:
            self._files.close()

    async def _cancel_recoveries(self) -> None:
        recoveries = [replica.recovery for replica in self._replicas if replica.recovery is not None]
        for recovery in recoveries:
            recovery.cancel()
        if recoveries:
            await asyncio.wait(recoveries)

    # One request.

    async def _ask(self, replica: Replica, waiting: PooledRequest) -> Completion | None:
        """Ask `replica`; None where it answered with other weights than it was given."""
        request, before, epoch = waiting.request, replica.version, replica.epoch
        try:
            completion = await replica.engine.generate(request)
        except EngineLostError as problem:
            self.num_lost += 1
            replica.num_lost += 1
            if epoch == replica.epoch:
                self._down(replica, problem)
            raise
        finally:
            self.admission.free(replica, waiting)
        versions = [version for _, version in completion.policy_versions]
        if not all(before <= version <= max(self._coming, replica.version) for version in versions):
            self.num_stale += 1
            if epoch == replica.epoch and not replica.is_stale:
                self.exclude(replica, EngineError(f"it answers as policy version {versions[-1]} and was given {before}"))
            return None
        replica.num_done += 1
        if epoch == replica.epoch:
            self._up(replica)
        return completion

    # One server.

    def _down(self, replica: Replica, problem: EngineError) -> None:
        """Leave `replica` out until it is well."""
        loop = asyncio.get_running_loop()
        if replica.is_up or loop.time() >= replica.probes_at:
            replica.epoch += 1
            replica.probes_at = loop.time() + replica.pause_s
            loop.call_later(replica.pause_s, self.admission.admit)  # no answer may come that would look at the queue
            logger.warning(
                "%s is left out (%s); %d requests run there, and those that fail are asked of another server",
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
        """Start to bring `replica` back, where its engine can be asked how it is."""
        is_for_later = self._is_closed or self._is_asleep
        if isinstance(replica.engine, Revivable) and replica.recovery is None and not (replica.is_gone or is_for_later):
            replica.recovery = asyncio.create_task(self._recover(replica, replica.engine), name=f"recover {replica.name}")

    @asynccontextmanager
    async def _again(self, served: PoolWeights) -> AsyncIterator[Any]:
        """Give the weights that are served for one server: those that are kept, or the trainer's, which wait meanwhile."""
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
        except Exception as problem:  # whatever the reason, do not wait for a server that cannot be restarted
            replica.is_gone, replica.recovery, replica.why = True, None, one_line(problem)
            left = sum(not other.is_gone for other in self._replicas)
            trace = None if isinstance(problem, EngineGoneError) else problem
            message = "%s is out for good (%s); %d servers are left"
            logger.error(message, replica.name, one_line(problem), left, exc_info=trace)
            self.admission.admit()
            self.on_change()
