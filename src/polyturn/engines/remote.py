"""RemoteEngine: the common client of inference servers; `vllm.py` and `sglang.py` add the servers' formats.

One request is one POST with token ids in and token ids out. This class decides for all servers:

- ids are checked before they are sent (an id outside the vocabulary crashes some servers);
- a request waits for a free slot before it is sent, so that the server's queue stays short and the client keeps the order;
- a request is repeated only if it was certainly not accepted; otherwise the caller gets an error;
- a call that is cancelled or past its deadline aborts its request on the server;
- while requests run, the server's health is checked; if it hangs, all of them fail;
- a forbidden sampled id is discarded and sampled again, which does not change the logprobs of other tokens;
- while the server sleeps or loads weights, no request is sent, and requests that were cut are continued afterwards;
- the client names the weights, so that an answer shows whether the server used the weights that were sent.

Rollout workers also send requests to the servers directly. Their clients copy the state of the controller's
client (`ClientView`): its address, the names of its weights, and whether the weights are changing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Container, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from polyturn.core.continuation import before_banned, continued, joined, nothing, version_runs
from polyturn.core.errors import EngineBusyError, EngineError, EngineLostError, one_line
from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.protocols import EngineLoad
from polyturn.engines.base import BaseEngine
from polyturn.engines.dialect import UNSEEN, ServerDialect, ServerFacts, release
from polyturn.engines.http_client import HttpClient
from polyturn.engines.launcher import RunningServer
from polyturn.engines.options import ServerOptions
from polyturn.engines.pending_request import PendingRequest
from polyturn.engines.request_limits import ServedModel, check_request
from polyturn.engines.served_media import ServedMedia
from polyturn.engines.served_routes import ServedRoutes
from polyturn.engines.supervisor import ServerSupervisor
from polyturn.engines.weights.folder import ServerWeights, WeightFolder
from polyturn.engines.weights.transfer import WeightTransfer

logger = logging.getLogger(__name__)

FOREIGN_VERSION = -1
"""The policy version of tokens from unknown weights, after this client has sent weights."""
CONTROL_TIMEOUT_S = 60.0
"""Deadline of control calls (pause, resume, queries), in seconds."""
LOAD_TIMEOUT_S = 600.0
"""Deadline of a call that loads weights, in seconds."""
BUSY_LIMIT_S = 60.0
"""Seconds for which a request is repeated to a server that is full."""
_USUAL = ServerOptions(kind="vllm")
"""Default options of requests, the same for every kind."""
_NUM_LOOKS = 2
"""Number of consecutive failed health checks after which a server counts as lost."""
_NUM_LOADS = 1000
"""Largest number of unread load records."""
LOOK_SHARE = 0.5
"""Share of `health_s` between two health checks."""
_HUNG_AFTER = 3.0
"""A started server without an answer for this many times `health_s` is killed and restarted."""
_MAX_VAIN = 16
"""A request fails after this many consecutive times in which the server cut it before it sampled a token."""
_UNREADABLE = (AttributeError, LookupError, TypeError, ValueError)
"""Errors of reading an answer that has another form than expected."""


@dataclass(slots=True, eq=False)
class ServedAdapter:
    """An adapter on a server, under a unique name, so that a late request still finds the previous one. A request keeps its
    adapter to the end."""

    name: str
    version: int = FOREIGN_VERSION
    """The policy version of the adapter, once the server has the new name."""


class ClientView(NamedTuple):
    """The part of a client's state that another process needs to send requests to the same server."""

    url: str
    prefix: str
    """Precedes the version in the names that the client gives to weights; see `RemoteEngine.tag`."""
    num_updates: int
    version: int
    adapter: ServedAdapter | None


class RemoteEngine(ServerDialect, BaseEngine):
    """A client of one server; `core.protocols.Engine`."""

    def __init__(
        self,
        url: str,
        model: ServedModel,
        *,
        options: ServerOptions = _USUAL,
        transfer: WeightTransfer | None = None,
        headers: Mapping[str, str] | None = None,
        supervisor: ServerSupervisor | None = None,
    ) -> None:
        """Prepare a client; the first call starts the server or sends a request.

        Args:
            url: The server's address, for example "http://127.0.0.1:8000"; "" if `supervisor` starts the server.
            model: Facts about the served model.
            options: Limits on concurrency and time.
            transfer: Sends new weights to the server; None sends them through a folder.
            headers: Headers of every request, for instance an authorization.
            supervisor: Starts the server on first use, and restarts it if it dies or hangs; `close` stops it.
        """
        super().__init__()
        self.version = 0
        self.num_busy = 0
        """Number of requests that the server refused because it was full."""
        self._link = HttpClient(url, headers=headers, timeout_s=CONTROL_TIMEOUT_S)
        self._updates = 0
        self._prefix = f"polyturn-{uuid.uuid4().hex[:8]}-"
        self._model = model
        self._timeout_s, self._health_s = options.timeout_s, options.health_s
        self._busy_limit_s = BUSY_LIMIT_S
        self._slots = asyncio.Semaphore(options.max_in_flight)
        self._live: dict[str, PendingRequest] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        """Cleared while requests are live."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._transfer = transfer
        self._store = transfer or (None if model.folder is None else WeightFolder(model.folder))
        self._media = ServedMedia(model.media)
        self._routes = ServedRoutes(model.routes, is_needed=model.needs_routes)
        self.supervisor = supervisor
        """The supervisor of the server; None for a server that the run did not start."""
        self._facts: ServerFacts | None = None
        self._meeting: asyncio.Task[None] | None = None
        """Starts the server and gets its facts. The end of a request that waits for it does not stop it."""
        self._silent_since: float | None = None
        """Time of `time.monotonic`, in seconds, since which a lost server has not answered, or since its start."""
        self._adapter: ServedAdapter | None = None
        """The latest adapter on the server; None if requests use the model itself."""
        self._former_adapter: ServedAdapter | None = None
        """The adapter before it, which a late request may still name."""
        self._sees_folders = supervisor is not None or options.weights_folder is not None
        """Whether the server certainly sees the folders of new weights."""
        self._is_open = asyncio.Event()
        self._is_open.set()
        """Cleared while weights change or the server sleeps."""
        self._is_asleep = False
        self._is_closed = False
        self._follows = False
        """Whether this client copies the state of a client in another process, which controls the server; see `follow`."""
        self._loads: deque[EngineLoad | None] = deque(maxlen=_NUM_LOADS)
        """Load records since the last `read_metrics`."""
        self._latest_load: EngineLoad | None = None

    @property
    def url(self) -> str:
        """The server's address."""
        return self._link.url

    @property
    def software(self) -> str:
        """The kind and version of the server; "" before the first request."""
        return "" if self._facts is None else f"{self.name} {self._facts.version}"

    @property
    def num_restarts(self) -> int:
        """Number of restarts of the server."""
        return 0 if self.supervisor is None else self.supervisor.num_restarts

    @property
    def load(self) -> EngineLoad | None:
        """The server's last known load; None if it reports none, or runs no request."""
        return self._latest_load if self._live else None

    def read_metrics(self) -> Mapping[str, float]:
        """Return the server's mean load since the last call; empty if it reported none."""
        known = [load for load in self._loads if load is not None]
        self._loads.clear()
        if not known:
            return {}
        means = EngineLoad(*(sum(values) / len(known) for values in zip(*known, strict=True)))
        return {"engine/queue": means.queue, "engine/kv_use": means.kv_use}

    # core.protocols.Engine.

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion.

        Raises:
            EngineLostError: the server could not be reached, failed, ended the connection, hangs or took too long.
            EngineError: the request cannot work, the server refused it, or the client was closed.
        """
        self._check(request, live=self._live)
        pending = self._live[request.request_id] = PendingRequest(
            lambda: self.url, abort=self._abort_quietly, abort_later=self._abort_later, busy_limit_s=self._busy_limit_s
        )
        self._is_idle.clear()
        try:
            if self._facts is None:
                if not await pending.done(self._met(), deadline=request.deadline):
                    return nothing(self.version)
                self._check(request)  # now also against the server's limits
            with self.busy.running():
                async with self._slot(pending, request) as has_slot:
                    return await self._sample(request, pending) if has_slot else nothing(self.version)
        finally:
            self.num_busy += pending.num_busy
            del self._live[request.request_id]
            if not self._live:
                self._is_idle.set()

    async def abort(self, request_id: str) -> None:
        """End a request now; its `generate` returns the tokens so far. Unknown ids are fine."""
        if (pending := self._live.get(request_id)) is not None:
            pending.end()

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | ServerWeights | None = None) -> None:
        """Serve `version` from now on: pause, load, drop earlier results, resume.

        For the current version, without weights, only earlier results are dropped.

        Raises:
            EngineLostError: the server did not answer; its weights are now unknown.
            EngineError: there are no weights to send or no folder to write them to, or the server refused.
        """
        if weights is None and version == self.version:
            await self._met()
            await self._forget()
            return
        if isinstance(weights, ServerWeights):
            await self._take(weights, version)
            return
        if weights is None or self._store is None:
            raise EngineError(
                f"the {self.name} engine at {self.url} runs in a separate process, so an update needs `weights`"
                + ("" if weights is None else "; make it with `ServedModel.folder`, the folder with the model's config")
            )
        written = await asyncio.to_thread(self._store.write, weights)
        try:
            await self._take(written, version)
        finally:
            await written.settle()
            self._store.drop()

    async def sleep(self) -> None:
        """Make the server release its GPU memory until the next weight update wakes it. Running requests are cut, and
        continue after it wakes. A server that the run started and that does not answer is stopped, because it would keep the
        memory.

        Raises:
            EngineLostError: a server that the run did not start did not answer.
            EngineError: the server refused.
        """
        await self._met()
        self._is_open.clear()
        self._is_asleep = True
        self._updates += 1
        try:
            await self._sleep()
        except EngineLostError as problem:
            if self.supervisor is None:
                raise
            logger.warning(
                "the server at %s did not release its memory (%s); the server is stopped",
                self.url,
                one_line(problem),
            )
            await self.supervisor.stop()

    async def _take(self, weights: ServerWeights, version: int) -> None:
        """Load `weights` into the paused server."""
        with weights.given_to(self):
            await self._met()
            self._is_open.clear()
            self._updates += 1  # before pause and load, which may cut requests: cut requests are continued
            try:
                await (self._wake("weights") if self._is_asleep else self._pause())
                is_loaded = False
                try:
                    await weights.load(self)
                    is_loaded = True
                    if not self._is_asleep:  # a sleeping server has lost earlier results with its memory
                        await self._loaded()
                    await self._rename(self.tag(version))
                    if self._adapter is not None:
                        self._adapter.version = version
                except BaseException as problem:
                    has_refused = isinstance(problem, EngineError) and not isinstance(problem, EngineLostError)
                    has_former = has_refused and weights.is_all_or_nothing and not (is_loaded or self._is_asleep)
                    if not has_former:  # tokens from unknown weights are discarded
                        with contextlib.suppress(EngineError):
                            await self._rename(f"{self._prefix}unfinished")
                    raise
                finally:  # also after a failure, because a paused server answers no request
                    await (self._wake("kv_cache") if self._is_asleep else self._resume())
                self.version, self._silent_since = version, None
            finally:
                self._is_asleep = False
                self._is_open.set()

    # weights.transfer.TransferServer and weights.folder.FolderServer.

    @property
    def process(self) -> RunningServer | None:
        """The server's process, if this client started it."""
        return None if self.supervisor is None else self.supervisor.server

    @property
    def num_workers(self) -> int:
        """Number of processes with weights, each with a share of the model."""
        return 1 if self._facts is None else self._facts.num_workers

    async def tell(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Post to the server with the deadline for loading weights.

        Raises:
            EngineLostError: the server did not answer.
            EngineError: the server refused.
        """
        return await self._post(path, body, timeout_s=LOAD_TIMEOUT_S)

    async def load_adapter(self, folder: Path) -> None:
        """Make the server load the adapter in `folder`, which later requests name.

        Raises:
            EngineError: the server cannot load it.
        """
        adapter = ServedAdapter(f"{self._prefix}adapter-{self._updates}")
        try:
            await self._load_adapter(adapter.name, folder)
        except EngineLostError:
            raise
        except EngineError as problem:
            raise EngineError(
                f"{self.url} does not load the adapter in {folder}; {UNSEEN}; a running server needs {self.adapter_flags} "
                f"({one_line(problem)})"
            ) from problem
        former, self._former_adapter, self._adapter = self._former_adapter, self._adapter, adapter
        if former is not None:
            with contextlib.suppress(EngineError):  # a restarted server does not have it
                await self._unload_adapter(former.name)

    async def is_as_left(self) -> bool | None:
        """Return whether the server's weights still have the name that this client set last; None if the server does not
        answer. A restarted server does not have that name."""
        try:
            return await self._named() == self.tag(self.version)
        except EngineError:
            return None

    async def revive(self) -> None:
        """Wait until the server answers; if this client started it and it died or hangs, restart it.

        Raises:
            EngineGoneError: no restart is left.
            EngineLostError: the server does not answer (yet).
        """
        if self._silent_since is None:
            self._silent_since = time.monotonic()
        if self.supervisor is not None and self.process is None:
            self._link.url = (await self.supervisor.start()).url
            self._silent_since = time.monotonic()
        elif self.supervisor is not None and self.process is not None:
            hangs = time.monotonic() - self._silent_since > _HUNG_AFTER * self._health_s
            if hangs or await self.process.is_dead():
                why = f"the server at {self.url} {'hangs' if hangs else 'has died'}"
                await self._link.close()
                self._link.url = (await self.supervisor.again(why)).url
                self._silent_since, self._adapter = time.monotonic(), None
        try:
            await asyncio.wait_for(self._look_once(), self._health_s)
        except TimeoutError as problem:
            raise EngineLostError(f"{self.url} did not answer within {self._health_s:g} s") from problem
        self._silent_since = None

    async def start(self) -> None:
        """Start the server if needed, and get its facts; only once.

        Raises:
            EngineLostError: the server did not answer.
            EngineError: the server did not come up, or does not fit the run.
        """
        await self._met()

    async def look(self) -> None:
        """Check that the server is healthy and has the weights that it was sent. While its weights change or it sleeps, only
        check that its process is alive.

        Raises:
            EngineLostError: the server has died, or failed two consecutive health checks.
            EngineError: the server serves other weights.
        """
        for _ in range(_NUM_LOOKS):
            server, updates = self.process, self._updates
            if server is not None and await server.is_dead():
                raise EngineLostError(f"the server at {self.url} has died")
            if not self._is_open.is_set():
                return
            if await self._is_well():
                if updates and await self.is_as_left() is False and updates == self._updates:
                    raise EngineError(
                        f"the server at {self.url} serves other weights than this run sent; check that nothing else "
                        "restarts the server or sends weights to it"
                    )
                return
            await asyncio.sleep(self._health_s * LOOK_SHARE)
        raise EngineLostError(f"the server at {self.url} failed {_NUM_LOOKS} health checks in a row; see its log")

    # Clients of the same server in other processes.

    @property
    def view(self) -> ClientView:
        """The state that a client in another process follows."""
        return ClientView(self.url, self._prefix, self._updates, self.version, self._adapter)

    def follow(self, view: ClientView, *, is_open: bool) -> None:
        """Copy the state of a client in another process, and use its server; hold requests back unless `is_open`."""
        self._link.url, self._prefix, self._updates, self.version, self._adapter = view
        self._follows = True
        if is_open:
            self._is_open.set()
        else:
            self._is_open.clear()

    async def close(self) -> None:
        """Fail live requests, close the connections, and stop the server if this client started it."""
        self._is_closed = True
        for pending in self._live.values():
            pending.give_up(EngineError(f"the {self.name} client of {self.url} was closed while the request ran"))
        await self._is_idle.wait()
        for task in (self._watch, self._meeting):
            if task is not None:
                task.cancel()
        while self._tasks:  # an abort of a failed request
            await asyncio.wait(self._tasks)
        if self._transfer is not None:
            await self._transfer.unlink()
        await self._link.close()
        if self._store is not None:
            self._store.close()
        if self.supervisor is not None:
            await self.supervisor.stop()

    def tag(self, version: int) -> str:
        """Return the server's name for `version` of this client's weights."""
        return f"{self._prefix}{version}"

    def version_of(self, tag: str) -> int:
        """Return the policy version for a server's `tag`.

        Before this client has sent weights, any weights of the server count as version 0.
        """
        number = tag.removeprefix(self._prefix)
        if number != tag and number.isdigit():
            return int(number)
        return FOREIGN_VERSION if self._updates else 0

    # The server.

    async def _met(self) -> None:
        """Start the server if needed, and get its facts; only once."""
        if self._facts is None:
            if self._meeting is None:
                self._meeting = self._background(self._meet())
            await asyncio.shield(self._meeting)

    async def _meet(self) -> None:
        try:
            if self.supervisor is not None:
                self._link.url = (await self.supervisor.start()).url
            try:
                self._facts = await self._describe()
            except _UNREADABLE as problem:
                raise EngineError(
                    f"the server at {self.url} does not describe itself as {self.name} {self.tested_version} does "
                    f"({one_line(problem)}); check the address and engine.kind, or install that version there"
                ) from problem
            self._warn_of_version(self._facts.version)
        except asyncio.CancelledError:
            if not self._is_closed:
                raise
            raise EngineError(f"the {self.name} client was closed while its server started") from None
        finally:
            self._meeting = None

    def _warn_of_version(self, version: str) -> None:
        if self._follows:
            return  # the controller warns
        if version and release(version) != release(self.tested_version):
            logger.warning(
                "the server at %s runs %s %s, and polyturn is tested with %s; if the run fails there, install that version",
                self.url,
                self.name,
                version,
                self.tested_version,
            )

    async def _look_once(self) -> None:
        try:
            await self._look()
        except EngineBusyError as problem:  # servers report bad health with 503
            raise EngineLostError(one_line(problem)) from problem

    async def _is_well(self) -> bool:
        """Return whether the server is healthy, and record its load."""
        try:
            async with asyncio.timeout(self._health_s):
                await self._look_once()
                with contextlib.suppress(EngineError, *_UNREADABLE):  # without a known load, it is still healthy
                    self._latest_load = await self._read_load()
                    self._loads.append(self._latest_load)
        except (EngineError, TimeoutError):
            return False
        if self.process is not None:
            self.process.record_memory()
        return True

    async def _watch_health(self) -> None:
        """While requests run, check the server's health; if it fails, fail all requests."""
        failed = 0
        while self._live:
            await asyncio.sleep(self._health_s * LOOK_SHARE)
            if not self._is_open.is_set():  # updates have separate deadlines
                failed = 0
                continue
            failed = 0 if await self._is_well() or not self._is_open.is_set() else failed + 1
            if failed >= _NUM_LOOKS:
                for pending in self._live.values():
                    pending.give_up(EngineLostError(f"{self.url} accepts requests and does not answer them"))
                break
        self._watch = None

    # One request.

    @contextlib.asynccontextmanager
    async def _slot(self, pending: PendingRequest, request: GenerateRequest) -> AsyncIterator[bool]:
        """Wait for a slot, and hold it inside the block; false if the caller ends the request, or it is late, before."""
        has_slot = False

        async def take() -> None:
            nonlocal has_slot
            has_slot = await self._slots.acquire()

        try:
            yield await pending.done(take(), deadline=request.deadline)
        finally:
            if has_slot:
                self._slots.release()

    async def _sample(self, request: GenerateRequest, pending: PendingRequest) -> Completion:
        """Send `request`, and continue it for as long as updates cut it."""
        if self._watch is None:
            self._watch = self._background(self._watch_health())
        parts: list[Completion] = []
        while True:
            if not await pending.opened(self._is_open, deadline=request.deadline):
                return joined([*parts, nothing(self.version)])
            updates = self._updates
            parts.append(await self._ask(request, parts, pending))
            if cut := before_banned(request, parts):
                parts[-1] = cut
                continue
            is_late = request.deadline is not None and asyncio.get_running_loop().time() >= request.deadline
            was_cut = parts[-1].finish_reason is FinishReason.ABORT and not pending.is_ended and not is_late
            # Only an update cuts a request that its caller did not end; a follower may hear of the update later.
            if not was_cut or (self._updates == updates and not self._follows):
                return joined(parts)
            if len(parts) >= _MAX_VAIN and not any(len(part.token_ids) for part in parts[-_MAX_VAIN:]):
                raise EngineLostError(f"{self.url} cut {request.request_id!r} {_MAX_VAIN} times in a row")

    async def _ask(self, request: GenerateRequest, parts: Sequence[Completion], pending: PendingRequest) -> Completion:
        """Send `request`, continued after the tokens of `parts`, and wait for the answer."""
        if parts:
            request = continued(request, parts)
        adapter: ServedAdapter | None = None

        async def post(wire_id: str) -> Any:
            nonlocal adapter
            adapter = self._adapter
            call = self._call(request, wire_id)
            return await self._post(call.path, call.body, timeout_s=self._timeout_s)

        reply = await pending.run(post, deadline=request.deadline)
        if reply is None:
            return nothing(self.version)
        try:
            completion = self._read(request, reply)
        except _UNREADABLE as problem:
            raise EngineError(f"{self.url} returned an invalid {self.name} reply ({one_line(problem)})") from problem
        if adapter is None:
            return completion
        # The server reports its weights, not the adapter: a late request may still use the previous adapter.
        runs = [(start, min(version, adapter.version)) for start, version in completion.policy_versions]
        return replace(completion, policy_versions=version_runs(runs, current=adapter.version))

    def _check(self, request: GenerateRequest, *, live: Container[str] = ()) -> None:
        if self._is_closed:
            raise EngineError(f"the {self.name} client of {self.url} is closed")
        check_request(
            request,
            live=live,
            vocab_size=self._model.vocab_size,
            max_context=self._context,
            takes_media=self.capabilities.media,
        )

    @property
    def _context(self) -> int | None:
        """Largest length of prompt plus completion, in tokens: the smaller of the client's and the server's limits."""
        own = None if self._facts is None else self._facts.max_context
        limits = [limit for limit in (self._model.max_context, own) if limit is not None]
        return min(limits, default=None)

    def _room(self, request: GenerateRequest) -> int:
        """Return the limit of sampled tokens: the request's, or the rest of the context."""
        wanted, context = request.sampling.max_tokens, self._context
        return wanted if context is None else min(wanted, context - len(request.prompt_ids))

    async def _abort_quietly(self, wire_id: str) -> None:
        try:
            await self._abort(wire_id)
        except EngineError as problem:
            logger.debug("%s: a request could not be aborted (%s)", self.url, one_line(problem))

    def _abort_later(self, wire_id: str) -> None:
        self._background(self._abort_quietly(wire_id))

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in the background; `close` waits for it."""
        task = asyncio.create_task(work, name=f"polyturn-{self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None) -> Any:
        return await self._link.post(path, body, timeout_s=timeout_s)
