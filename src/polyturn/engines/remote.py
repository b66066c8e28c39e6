"""RemoteEngine: the shared client of inference servers. The dialects of servers are in `vllm.py` and `sglang.py`.

One request is one POST with token ids in and token ids out. What is decided here, once for both:

- ids are checked before they are sent (an id beyond the vocabulary kills some servers);
- a request waits for a free place before it is sent, so that a server's queue stays short and order stays ours;
- a request is sent again only when it surely was not taken; everything else is an error for the caller;
- a cancelled call, and one past its deadline, aborts its request on the server;
- while requests run the server's health is looked at, and where it hangs they are all given up;
- an id that must not be sampled is thrown away and sampled anew, which leaves the logprobs of all others as they are;
- while the server sleeps or its weights are updated no request is sent, and one that was cut short goes on from there;
- weights are named by this client, so that an answer tells whether they are the ones it sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polyturn.core.continuation import before_banned, continued, joined, nothing, version_runs
from polyturn.core.errors import EngineBusyError, EngineError, EngineLostError, one_line
from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.protocols import EngineLoad
from polyturn.engines.base import BaseEngine
from polyturn.engines.dialect import ServerDialect, ServerFacts
from polyturn.engines.http_client import HttpClient
from polyturn.engines.launcher import RunningServer
from polyturn.engines.options import ServerOptions
from polyturn.engines.pending_request import PendingRequest
from polyturn.engines.request_limits import ServedModel, check_request
from polyturn.engines.served_media import ServedMedia
from polyturn.engines.served_routes import ServedRoutes
from polyturn.engines.supervisor import ServerSupervisor
from polyturn.engines.weight_files import ServerWeights, WeightFolder
from polyturn.engines.weight_transfer import WeightTransfer

logger = logging.getLogger(__name__)

FOREIGN_VERSION = -1
"""The policy version of tokens from weights that this client did not send, once it has sent some."""
CONTROL_TIMEOUT_S = 60.0
"""A call that pauses, resumes or asks counts as lost beyond."""
LOAD_TIMEOUT_S = 600.0
"""A call in which a server loads weights counts as lost beyond."""
BUSY_LIMIT_S = 60.0
"""Seconds that a request is sent again and again to a server that says it is full."""
_USUAL = ServerOptions(kind="vllm")
"""Default options of requests: alike for every kind."""
_NUM_LOOKS = 2
"""So many looks at a server's health in a row must fail for it to count as lost."""
_NUM_LOADS = 1000
"""The number that is kept unread."""
LOOK_SHARE = 0.5
"""Part of `health_s` between two looks at a server."""
_HUNG_AFTER = 3.0
"""A server of our own that has not answered for so many times `health_s` is killed and started again."""


@dataclass(slots=True, eq=False)
class ServedAdapter:
    """An adapter on a server, under a name that no other one had. A request keeps the one that it names to its end."""

    name: str
    version: int = FOREIGN_VERSION
    """The policy version that it is, once the server calls its weights so."""


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
        """Make a client; nothing is started or sent before the first call.

        Args:
            url: Where the server listens, for example "http://127.0.0.1:8000"; "" where `supervisor` starts one.
            model: What is known of the model that it serves.
            options: How requests are sent: how many at once, and what counts as lost.
            transfer: Sends new weights to the server; without it they go through a folder.
            headers: Sent with every request, for instance an authorization.
            supervisor: Starts the server on first use, and again when it has died or hangs; `close` stops it.
        """
        super().__init__()
        self.version = 0
        self.num_busy = 0
        """Number of times that the server refused a request because it was full."""
        self._link = HttpClient(url, headers=headers, timeout_s=CONTROL_TIMEOUT_S)
        self._updates = 0
        self._prefix = f"polyturn-{uuid.uuid4().hex[:8]}-"
        self._model = model
        self._timeout_s, self._health_s = options.timeout_s, options.health_s
        self._busy_limit_s = BUSY_LIMIT_S
        self._places = asyncio.Semaphore(options.max_in_flight)
        self._live: dict[str, PendingRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._transfer = transfer
        self._store = transfer or (None if model.folder is None else WeightFolder(model.folder))
        self._media = ServedMedia(model.media)
        self._routes = ServedRoutes(model.routes, is_needed=model.needs_routes)
        self._supervisor = supervisor
        self._facts: ServerFacts | None = None
        self._meeting = asyncio.Lock()
        self._silent_since: float | None = None
        self._adapter: ServedAdapter | None = None
        """The latest adapter that the server was given; None while requests are for the model itself."""
        self._is_open = asyncio.Event()
        self._is_open.set()
        """Cleared while the weights change, and while the server sleeps."""
        self._is_asleep = False
        self._is_closed = False
        self._loads: deque[EngineLoad | None] = deque(maxlen=_NUM_LOADS)
        """As of the latest looks at the server since they were last read."""
        self._latest_load: EngineLoad | None = None

    @property
    def supervisor(self) -> ServerSupervisor | None:
        """The launcher of the server; None for a server that the run did not start."""
        return self._supervisor

    @property
    def url(self) -> str:
        """The server's address."""
        return self._link.url

    @property
    def software(self) -> str:
        """The kind and version of the server, "" before it was asked."""
        return "" if self._facts is None else f"{self.name} {self._facts.version}"

    @property
    def num_restarts(self) -> int:
        """Number of times that the server was started again."""
        return 0 if self._supervisor is None else self._supervisor.num_restarts

    @property
    def load(self) -> EngineLoad | None:
        """The server's load as last read; None if it reports none, or runs no request."""
        return self._latest_load if self._live else None

    def read_metrics(self) -> Mapping[str, float]:
        """Return the server's load as last read; empty if it did not report any."""
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
            EngineError: the request cannot work, or the server refused it.
        """
        self._check(request)
        if self._facts is None:
            await self._met()
            self._check(request)  # now also against what the server said about itself
        pending = self._live[request.request_id] = PendingRequest(
            self.url, abort=self._abort_quietly, abort_later=self._abort_later, busy_limit_s=self._busy_limit_s
        )
        if self._watch is None:
            self._watch = self._background(self._watch_health())
        parts: list[Completion] = []
        try:
            with self.busy.running():
                async with self._places:
                    while True:
                        await self._is_open.wait()
                        updates = self._updates
                        parts.append(await self._ask(request, parts, pending))
                        if cut := before_banned(request, parts):
                            parts[-1] = cut
                            continue
                        is_late = request.deadline is not None and asyncio.get_running_loop().time() >= request.deadline
                        was_cut = parts[-1].finish_reason is FinishReason.ABORT and not pending.is_ended and not is_late
                        if not was_cut or self._updates == updates:  # only an update cuts what its caller wants whole
                            return joined(parts)
        finally:
            self.num_busy += pending.num_busy
            del self._live[request.request_id]

    async def abort(self, request_id: str) -> None:
        """End a request now; its `generate` returns what there is. Unknown ids are fine."""
        if (pending := self._live.get(request_id)) is not None:
            pending.end()

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | ServerWeights | None = None) -> None:
        """Serve `version` from now on: pause, load, drop what was computed before, resume.

        The version that is served already, without weights, only drops what was computed before.

        Raises:
            EngineLostError: the server did not answer; what it serves now is unknown.
            EngineError: there are no weights to send or no place to write them, or the server refused.
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
                f"the {self.name} engine at {self.url} runs in a process of its own and needs the weights themselves"
                + ("" if weights is None else "; make it with `ServedModel.folder`, the folder with the model's config")
            )
        written = await asyncio.to_thread(self._store.write, weights)
        try:
            await self._take(written, version)
        finally:
            await written.settle()
            self._store.drop()

    async def sleep(self) -> None:
        """Let the server give back the memory of its GPUs until the next weights, which wake it. What it samples is cut, and
        goes on then. A server of this client's that does not answer is stopped, because it would keep the memory.

        Raises:
            EngineLostError: a server that the run did not start did not answer.
            EngineError: it refused.
        """
        await self._met()
        self._is_open.clear()
        self._is_asleep = True
        self._updates += 1
        try:
            await self._sleep()
        except EngineLostError as problem:
            if self._supervisor is None:
                raise
            logger.warning("%s is stopped, for it did not give its memory back (%s)", self.url, one_line(problem))
            await self._supervisor.stop()

    async def _take(self, weights: ServerWeights, version: int) -> None:
        """Let the server change to `weights`, with its requests held."""
        with weights.given_to(self):
            await self._met()
            self._is_open.clear()
            self._updates += 1  # before the pause, which may cut requests, and the load: what these cut short goes on
            try:
                await (self._wake("weights") if self._is_asleep else self._pause())
                try:
                    await weights.load(self)
                    if not self._is_asleep:  # what it had computed went with its memory
                        await self._loaded()
                    await self._rename(self.tag(version))
                    if self._adapter is not None:
                        self._adapter.version = version
                except BaseException:
                    if self._is_asleep or not weights.is_all_or_nothing:  # tokens from these weights are discarded
                        with contextlib.suppress(EngineError):
                            await self._rename(f"{self._prefix}unfinished")
                    raise
                finally:  # also after a failure: a paused server would answer no request
                    await (self._wake("kv_cache") if self._is_asleep else self._resume())
                self.version = version
            finally:
                self._is_asleep = False
                self._is_open.set()

    # weight_transfer.TransferServer and weight_files.FolderServer.

    @property
    def process(self) -> RunningServer | None:
        """The server's process, if this client started it."""
        return None if self._supervisor is None else self._supervisor.server

    @property
    def num_workers(self) -> int:
        """Processes that hold its weights, each with its share of the model."""
        return 1 if self._facts is None else self._facts.num_workers

    async def tell(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Post to the server with the time that loading may take.

        Raises:
            EngineLostError: it did not answer.
            EngineError: it refused.
        """
        return await self._post(path, body, timeout_s=LOAD_TIMEOUT_S)

    async def is_as_left(self) -> bool | None:
        """Return whether its weights have the name that they were given last, which a new process does not know; None if it
        does not answer."""
        try:
            return await self._named() == self.tag(self.version)
        except EngineError:
            return None

    async def revive(self) -> None:
        """Return once the server answers; start it again if it is this client's and has died or hangs.

        Raises:
            EngineGoneError: it may not be started again.
            EngineLostError: it does not answer (yet).
        """
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
        if self._supervisor is not None and self._supervisor.server is None:
            self._link.url = (await self._supervisor.start()).url
        elif self._supervisor is not None and self._supervisor.server is not None:
            hangs = now - self._silent_since > _HUNG_AFTER * self._health_s
            if hangs or await self._supervisor.server.is_dead():
                why = f"the server at {self.url} {'hangs' if hangs else 'has died'}"
                await self._link.close()
                self._link.url = (await self._supervisor.again(why)).url
                self._adapter = None
        await asyncio.wait_for(self._look_once(), self._health_s)
        self._silent_since = None

    async def close(self) -> None:
        """Close the connections, and stop the server if this client started it."""
        self._is_closed = True
        if self._watch is not None:
            self._watch.cancel()
        for task in list(self._tasks):
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._transfer is not None:
            await self._transfer.unlink()
        await self._link.close()
        if self._store is not None:
            self._store.close()
        if self._supervisor is not None:
            await self._supervisor.stop()

    def tag(self, version: int) -> str:
        """Return the server's name for `version` of the weights that this client sends."""
        return f"{self._prefix}{version}"

    def version_of(self, tag: str) -> int:
        """Return the policy version that a server means by `tag`.

        Before this client has sent any weights the server may serve what it likes, and that is version 0.
        """
        number = tag.removeprefix(self._prefix)
        if number != tag and number.isdigit():
            return int(number)
        return FOREIGN_VERSION if self._updates else 0

    # The server.

    async def _met(self) -> None:
        """Start the server if it is this client's to start, and ask what it can do; once."""
        if self._facts is not None:
            return
        async with self._meeting:
            if self._facts is None:
                if self._supervisor is not None:
                    self._link.url = (await self._supervisor.start()).url
                self._facts = await self._describe()

    async def _look_once(self) -> None:
        try:
            await self._look()
        except EngineBusyError as problem:  # 503 is how servers say that they are ill
            raise EngineLostError(one_line(problem)) from problem

    async def _watch_health(self) -> None:
        """While requests run, look whether the server is at work; where it is not, give all of them up."""
        failed = 0
        while self._live:
            await asyncio.sleep(self._health_s * LOOK_SHARE)
            if not self._is_open.is_set():  # updates have deadlines of their own
                failed = 0
                continue
            try:
                async with asyncio.timeout(self._health_s):
                    await self._look_once()
                    with contextlib.suppress(EngineError):  # a server that does not tell its load is as well as others
                        self._latest_load = await self._read_load()
                        self._loads.append(self._latest_load)
                failed = 0
                if self._supervisor is not None and self._supervisor.server is not None:
                    self._supervisor.server.look_at_memory()
            except (EngineError, TimeoutError):
                failed = failed + 1 if self._is_open.is_set() else 0
            if failed >= _NUM_LOOKS:
                for pending in self._live.values():
                    pending.give_up(EngineLostError(f"{self.url} takes requests and does not answer them"))
                break
        self._watch = None

    # One request.

    async def _ask(self, request: GenerateRequest, parts: Sequence[Completion], pending: PendingRequest) -> Completion:
        """Send `request`, continued behind the tokens of `parts`, and wait for the answer."""
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
        except (KeyError, IndexError, TypeError, ValueError) as problem:
            raise EngineError(f"{self.url} answered what {self.name} does not say ({one_line(problem)})") from problem
        if adapter is None:
            return completion
        # The server names its weights, not the adapter: a request that reached it late still has the adapter before.
        runs = [(start, min(version, adapter.version)) for start, version in completion.policy_versions]
        return replace(completion, policy_versions=version_runs(runs, current=adapter.version))

    def _check(self, request: GenerateRequest) -> None:
        if self._is_closed:
            raise EngineError(f"the {self.name} client of {self.url} is closed")
        check_request(
            request,
            live=self._live,
            vocab_size=self._model.vocab_size,
            max_context=self._context,
            takes_media=self.capabilities.media,
        )

    @property
    def _context(self) -> int | None:
        """The longest prompt plus completion: what was said here, or the server's own limit if that is shorter."""
        own = None if self._facts is None else self._facts.max_context
        limits = [limit for limit in (self._model.max_context, own) if limit is not None]
        return min(limits, default=None)

    def _room(self, request: GenerateRequest) -> int:
        """Return the limit of sampled tokens: the request's, or the room that the context leaves."""
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
        """Run `work` without holding the caller up; `close` waits for it."""
        task = asyncio.create_task(work, name=f"polyturn-{self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None) -> Any:
        return await self._link.post(path, body, timeout_s=timeout_s)
