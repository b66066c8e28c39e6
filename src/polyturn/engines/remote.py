"""RemoteEngine: what the clients of inference servers share. A server's own words are in `vllm.py` and `sglang.py`.

One request is one POST with token ids in and token ids out. What is decided here, once for both:

- ids are checked before they are sent (an id beyond the vocabulary kills some servers);
- a request waits for a free place before it is sent, so that a server's queue stays short and order stays ours;
- a request is sent again only when it surely never reached the server; everything else is an error for the caller;
- a cancelled call, and one past its deadline, aborts its request on the server;
- while weights are updated no request is sent, and one that the update cut short goes on from where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import shutil
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from polyturn.core.errors import EngineError, one_line
from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.protocols import EngineCapabilities
from polyturn.engines.checks import check_request
from polyturn.engines.launcher import LaunchSpec, Server
from polyturn.engines.weight_files import WeightFolder

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

_CONNECT_TRIES = 5
_ABORT_GRACE_S = 10.0
_FIRST_ABORT_PAUSE_S, _LAST_ABORT_PAUSE_S = 0.005, 0.5


class EngineLostError(EngineError):
    """The server did not answer: it crashed, hangs or cannot be reached. The request may be asked of another one."""


class Call(NamedTuple):
    """A request as one server wants it."""

    path: str
    body: dict[str, Any]


@dataclass(slots=True)
class _Live:
    """A request whose `generate` has not returned."""

    wire_id: str = ""
    """The id that the server knows it by."""
    end: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the caller wants it to end."""


class RemoteEngine(ABC):
    """A client of one server; `core.protocols.Engine`."""

    name = "remote"

    def __init__(
        self,
        url: str,
        *,
        vocab_size: int,
        max_context: int | None = None,
        max_in_flight: int = 256,
        timeout_s: float = 600.0,
        headers: Mapping[str, str] | None = None,
        model: Path | None = None,
        owns_model: bool = False,
        launch: LaunchSpec | None = None,
    ) -> None:
        """Make a client; nothing is started or sent before the first call.

        Args:
            url: Where the server listens, for example "http://127.0.0.1:8000"; "" where `launch` starts one.
            vocab_size: Ids from here on are refused.
            max_context: The longest prompt plus completion, in tokens.
            max_in_flight: Requests on the server at once; more wait here.
            timeout_s: A request without a deadline that takes longer counts as lost.
            headers: Sent with every request, for instance an authorization.
            model: The folder with the model's config, which new weights are written beside; None for an engine whose
                weights never change.
            owns_model: Whether `close` removes that folder.
            launch: Starts a server on first use; `close` stops it.
        """
        self.url = url.rstrip("/")
        self.version = 0
        self._updates = 0
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._timeout_s = timeout_s
        self._headers = dict(headers or {})
        self._places = asyncio.Semaphore(max_in_flight)
        self._session: aiohttp.ClientSession | None = None
        self._live: dict[str, _Live] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._files = None if model is None else WeightFolder(model)
        self._own_folder = model if owns_model else None
        self._launch = launch
        self._server: Server | None = None
        self._starting = asyncio.Lock()
        self._busy_since = 0.0
        self._busy_s = 0.0
        self._is_open = asyncio.Event()
        self._is_open.set()
        """Cleared while the weights change."""
        self._is_closed = False

    # What a server's own client says.

    @property
    @abstractmethod
    def capabilities(self) -> EngineCapabilities:
        """What this engine can do."""

    @abstractmethod
    def _call(self, request: GenerateRequest, wire_id: str) -> Call:
        """Return `request` in the server's words."""

    @abstractmethod
    def _read(self, request: GenerateRequest, reply: Any) -> Completion:
        """Return the server's answer as a completion."""

    @abstractmethod
    async def _abort(self, wire_id: str) -> None:
        """Ask the server to end a request."""

    @abstractmethod
    async def _pause(self) -> None:
        """Hold the server's requests so that its weights can change."""

    @abstractmethod
    async def _load(self, folder: Path, version: int) -> None:
        """Let the server load the checkpoint in `folder`, drop what it computed before, and call itself `version`."""

    @abstractmethod
    async def _forget(self) -> None:
        """Let the server drop the prefixes that it has computed."""

    @abstractmethod
    async def _resume(self) -> None:
        """Let the server's requests go on."""

    # core.protocols.Engine.

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion.

        Raises:
            EngineLostError: the server could not be reached, ended the connection or took too long.
            EngineError: the request cannot work, or the server refused it.
        """
        self._check(request)
        await self._started()
        if not self._live:
            self._busy_since = time.perf_counter()
        live = self._live[request.request_id] = _Live()
        parts: list[Completion] = []
        try:
            async with self._places:
                while True:
                    await self._is_open.wait()
                    updates = self._updates
                    parts.append(await self._ask(request, parts, live))
                    if not self._goes_on(request, parts[-1], live) or self._updates == updates:
                        return parts[0] if len(parts) == 1 else _joined(parts)
        finally:
            del self._live[request.request_id]
            if not self._live:
                self._busy_s += time.perf_counter() - self._busy_since

    def _goes_on(self, request: GenerateRequest, part: Completion, live: _Live) -> bool:
        """Return whether `part` was cut by something that its caller did not ask for."""
        is_late = request.deadline is not None and asyncio.get_running_loop().time() >= request.deadline
        return part.finish_reason is FinishReason.ABORT and not live.end.is_set() and not is_late

    async def abort(self, request_id: str) -> None:
        """End a request now; its `generate` returns what there is. Unknown ids are fine."""
        if (live := self._live.get(request_id)) is not None:
            live.end.set()

    async def end_session(self, session_id: str) -> None:
        """Do nothing: the server's prefix cache forgets by itself."""
        return

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Serve `version` from now on: pause, load, drop what was computed before, resume.

        The version that is served already, without weights, only drops what was computed before.

        Raises:
            EngineError: there are no weights to send or no place to write them, or the server refused.
        """
        if weights is None and version == self.version:
            await self._started()
            await self._forget()
            return
        if weights is None or self._files is None:
            raise EngineError(
                f"the {self.name} engine at {self.url} runs in a process of its own and needs the weights themselves"
                + ("" if weights is None else "; make it with `model`, the folder with the model's config")
            )
        await self._started()
        folder = await asyncio.to_thread(self._files.write, weights)
        self._is_open.clear()
        try:
            await self._pause()
            self._updates += 1
            await self._load(folder, version)
            await self._resume()
            self.version = version
        finally:
            self._is_open.set()
            self._files.drop()

    async def close(self) -> None:
        """Close the connections. The server goes on."""
        self._is_closed = True
        for task in list(self._aborts):
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._session is not None:
            await self._session.close()
            self._session = None
        if self._files is not None:
            self._files.close()
        if self._server is not None:
            await self._server.stop()
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one request was being answered."""
        return self._busy_s + (time.perf_counter() - self._busy_since if self._live else 0.0)

    # The wire.

    async def _started(self) -> None:
        """Start the server, once, if it is this client's to start."""
        if self._launch is None or self._server is not None:
            return
        async with self._starting:
            if self._server is None:
                self._server = await Server.start(self._launch)
                self.url = self._server.url
                logger.info("started a %s server at %s (process %d)", self.name, self.url, self._server.pid)

    async def _ask(self, request: GenerateRequest, parts: Sequence[Completion], live: _Live) -> Completion:
        """Send `request`, continued behind the tokens of `parts`, and wait for the answer."""
        if parts:
            request = _continued(request, parts)
        live.wire_id = uuid.uuid4().hex
        call = self._call(request, live.wire_id)
        sent = asyncio.create_task(self._post(call.path, call.body, timeout_s=self._timeout_s))
        try:
            return self._read(request, await self._within(sent, request.deadline, live))
        except asyncio.CancelledError:
            sent.cancel()
            self._abort_later(live.wire_id)
            raise
        except EngineLostError:
            self._abort_later(live.wire_id)  # the server may still be at work on it
            raise

    def _check(self, request: GenerateRequest) -> None:
        if self._is_closed:
            raise EngineError(f"the {self.name} client of {self.url} is closed")
        check_request(
            request,
            live=self._live,
            vocab_size=self._vocab_size,
            max_context=self._max_context,
            takes_media=self.capabilities.media,
        )

    def _room(self, request: GenerateRequest) -> int:
        """Return how many tokens may be sampled: what was asked for, or what the context leaves."""
        wanted = request.sampling.max_tokens
        return wanted if self._max_context is None else min(wanted, self._max_context - len(request.prompt_ids))

    async def _within(self, sent: asyncio.Task[Any], deadline: float | None, live: _Live) -> Any:
        """Wait for the answer; once the deadline has passed or the caller wants an end, ask for what there is."""
        loop = asyncio.get_running_loop()
        left = None if deadline is None else max(deadline - loop.time(), 0.0)
        ended = asyncio.create_task(live.end.wait())
        try:
            await asyncio.wait({sent, ended}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        grace, pause = loop.time() + _ABORT_GRACE_S, _FIRST_ABORT_PAUSE_S
        while not sent.done():
            if loop.time() > grace:
                sent.cancel()
                raise EngineLostError(f"{self.url} did not end a request within {_ABORT_GRACE_S:.0f} s of being asked to")
            await self._abort(live.wire_id)  # again and again: the request may still have been on its way
            await asyncio.wait({sent}, timeout=pause)
            pause = min(2 * pause, _LAST_ABORT_PAUSE_S)
        return await sent

    def _abort_later(self, wire_id: str) -> None:
        """Abort without holding the caller up."""

        async def abort() -> None:
            try:
                await self._abort(wire_id)
            except EngineError as problem:
                logger.debug("%s: a request could not be aborted (%s)", self.url, one_line(problem))

        task = asyncio.create_task(abort(), name="polyturn-abort")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = 60.0) -> Any:
        """POST JSON and return the JSON that comes back; numpy arrays are sent as lists.

        Raises:
            EngineLostError: no answer came.
            EngineError: the server answered with an error.
        """
        import aiohttp
        import orjson

        session = self._connect()
        data = orjson.dumps(body or {}, option=orjson.OPT_SERIALIZE_NUMPY)
        pause = 0.05
        for attempt in range(_CONNECT_TRIES):
            try:
                async with session.post(
                    self.url + path,
                    data=data,
                    headers={"content-type": "application/json"},
                    timeout=aiohttp.ClientTimeout(total=timeout_s),
                ) as reply:
                    content = await reply.read()
                    if reply.status != 200:
                        raise EngineError(
                            f"{self.url}{path} answered {reply.status}: {content[:500].decode('utf-8', 'replace')}"
                        )
                    return orjson.loads(content) if content and "json" in reply.content_type else None
            except aiohttp.ClientConnectorError as problem:  # nothing was sent
                if attempt == _CONNECT_TRIES - 1:
                    raise EngineLostError(f"{self.url} cannot be reached ({one_line(problem)})") from problem
                await asyncio.sleep(pause)
                pause *= 2
            except TimeoutError as problem:
                raise EngineLostError(f"{self.url}{path} did not answer within {timeout_s:.0f} s") from problem
            except (aiohttp.ClientError, orjson.JSONDecodeError) as problem:
                raise EngineLostError(f"{self.url}{path} broke off ({one_line(problem)})") from problem
        raise AssertionError("unreachable: every attempt returns or raises")

    def _connect(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session


def version_number(text: str) -> int:
    """Return a server's weight version as a policy version; what a server calls itself before the first update is 0."""
    return int(text) if text.isdigit() else 0


def version_runs(runs: Sequence[tuple[int, int]], *, current: int) -> tuple[tuple[int, int], ...]:
    """Return (first token, version) runs from token 0 that change at each entry; `current` where there are none."""
    out: list[tuple[int, int]] = []
    for start, version in runs or [(0, current)]:
        if not out or out[-1][1] != version:
            out.append((start if out else 0, version))
    return tuple(out)


def _continued(request: GenerateRequest, parts: Sequence[Completion]) -> GenerateRequest:
    """Return the request for the rest of a completion of which `parts` are there."""
    ids = [part.token_ids for part in parts]
    done = sum(map(len, ids))
    return dataclasses.replace(
        request,
        prompt_ids=np.concatenate([request.prompt_ids, *ids]),
        sampling=dataclasses.replace(request.sampling, max_tokens=request.sampling.max_tokens - done),
    )


def _joined(parts: Sequence[Completion]) -> Completion:
    """Return the parts of one completion as one."""
    versions: list[tuple[int, int]] = []
    start = 0
    for part in parts:
        versions += [(start + first, version) for first, version in part.policy_versions if len(part.token_ids)]
        start += len(part.token_ids)
    return Completion(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts if part.logprobs is not None]),
        finish_reason=parts[-1].finish_reason,
        policy_versions=version_runs(versions, current=parts[-1].policy_versions[-1][1]),
        info={"prefilled_tokens": sum(part.info["prefilled_tokens"] for part in parts), "parts": len(parts)},
    )
