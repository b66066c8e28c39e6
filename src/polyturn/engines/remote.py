"""RemoteEngine: what the clients of inference servers share. A server's own words are in `vllm.py` and `sglang.py`.

One request is one POST with token ids in and token ids out. What is decided here, once for both:

- ids are checked before they are sent (an id beyond the vocabulary kills some servers);
- a request waits for a free place before it is sent, so that a server's queue stays short and order stays ours;
- a request is sent again only when it surely was not taken; everything else is an error for the caller;
- a cancelled call, and one past its deadline, aborts its request on the server;
- while requests run the server's health is looked at, and where it hangs they are all given up;
- while weights are updated no request is sent, and one that the update cut short goes on from where it was;
- weights are named by this client, so that an answer tells whether they are the ones it sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polyturn.core.errors import EngineBusyError, EngineError, EngineLostError, one_line
from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.protocols import EngineCapabilities
from polyturn.engines.checks import check_request
from polyturn.engines.keeper import Keeper
from polyturn.engines.launcher import LaunchSpec
from polyturn.engines.link import Link
from polyturn.engines.weight_files import WeightFolder, WrittenWeights

logger = logging.getLogger(__name__)

FOREIGN_VERSION = -1
"""The policy version of tokens from weights that this client did not send, once it has sent some."""
_ABORT_GRACE_S = 10.0
_ABORT_TIMEOUT_S = 5.0
_FIRST_ABORT_PAUSE_S, _LAST_ABORT_PAUSE_S = 0.005, 0.5
_FIRST_BUSY_PAUSE_S, _LAST_BUSY_PAUSE_S = 0.05, 2.0
_NUM_LOOKS = 2
"""So many looks at a server's health in a row must fail for it to count as lost."""
_HUNG_AFTER = 3.0
"""A server of our own that has not answered for so many times `health_s` is killed and started again."""


class Call(NamedTuple):
    """A request as one server wants it."""

    path: str
    body: dict[str, Any]


class ServerFacts(NamedTuple):
    """What a server says about itself."""

    seeded: bool
    priorities: bool
    max_context: int | None


@dataclass(slots=True)
class _Live:
    """A request whose `generate` has not returned."""

    wire_id: str = ""
    """The id that the server knows it by."""
    sent: asyncio.Task[Any] | None = None
    is_waiting: bool = False
    """Whether the server refuses it for now, so that there is nothing to end there."""
    problem: EngineLostError | None = None
    """Why it was given up."""
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
        control_timeout_s: float = 60.0,
        health_s: float = 20.0,
        busy_s: float = 60.0,
        headers: Mapping[str, str] | None = None,
        model: Path | None = None,
        launch: LaunchSpec | None = None,
        max_restarts: int = 3,
    ) -> None:
        """Make a client; nothing is started or sent before the first call.

        Args:
            url: Where the server listens, for example "http://127.0.0.1:8000"; "" where `launch` starts one.
            vocab_size: Ids from here on are refused.
            max_context: The longest prompt plus completion, in tokens.
            max_in_flight: Requests on the server at once; more wait here.
            timeout_s: A request without a deadline that takes longer counts as lost.
            control_timeout_s: The same for pausing, resuming and other short calls.
            health_s: How long the server may take to say that it is well; it is asked at this interval while requests run.
            busy_s: How long a request is sent again and again to a server that says it is full.
            headers: Sent with every request, for instance an authorization.
            model: The folder with the model's config, for an engine that writes new weights by itself; None where a
                pool does, or where they never change.
            launch: Starts a server on first use; `close` stops it.
            max_restarts: How often that server is started again when it has died or hangs.
        """
        self.version = 0
        self.num_busy = 0
        """How often the server refused a request because it was full."""
        self._link = Link(url, headers=headers, timeout_s=control_timeout_s)
        self._updates = 0
        self._prefix = f"polyturn-{uuid.uuid4().hex[:8]}-"
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._timeout_s = timeout_s
        self._health_s = health_s
        self._busy_limit_s = busy_s
        self._places = asyncio.Semaphore(max_in_flight)
        self._live: dict[str, _Live] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._files = None if model is None else WeightFolder(model)
        self._keeper = None if launch is None else Keeper(launch, max_restarts=max_restarts)
        self._facts: ServerFacts | None = None
        self._meeting = asyncio.Lock()
        self._silent_since: float | None = None
        self._busy_since = 0.0
        self._busy_s = 0.0
        self._is_open = asyncio.Event()
        self._is_open.set()
        """Cleared while the weights change."""
        self._is_closed = False

    @property
    def url(self) -> str:
        """Where the server listens."""
        return self._link.url

    @property
    def num_restarts(self) -> int:
        """How often the server was started again."""
        return 0 if self._keeper is None else self._keeper.num_restarts

    # What a server's own client says.

    @abstractmethod
    async def _describe(self) -> ServerFacts:
        """Ask the server what it can do.

        Raises:
            EngineError: it runs in a way that training cannot use.
        """

    @abstractmethod
    async def _look(self) -> None:
        """Return if the server's engine, not only its front, is at work; raise if it says that it is not.

        Not asked while weights change, and only what is quick.
        """

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
            EngineLostError: the server could not be reached, failed, ended the connection, hangs or took too long.
            EngineError: the request cannot work, or the server refused it.
        """
        self._check(request)
        await self._met()
        self._check(request)  # now also against what the server said about itself
        if not self._live:
            self._busy_since = time.perf_counter()
        live = self._live[request.request_id] = _Live()
        if self._watch is None:
            self._watch = self._background(self._watch_health())
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
            EngineLostError: the server did not answer; what it serves now is unknown.
            EngineError: there are no weights to send or no place to write them, or the server refused.
        """
        if weights is None and version == self.version:
            await self._met()
            await self._forget()
            return
        if isinstance(weights, WrittenWeights):
            await self._take(weights.folder, version)
            return
        if weights is None or self._files is None:
            raise EngineError(
                f"the {self.name} engine at {self.url} runs in a process of its own and needs the weights themselves"
                + ("" if weights is None else "; make it with `model`, the folder with the model's config")
            )
        await self._met()
        written = await asyncio.to_thread(self._files.write, weights)
        try:
            await self._take(written.folder, version)
        finally:
            self._files.drop()

    async def _take(self, folder: Path, version: int) -> None:
        """Let the server change to the checkpoint in `folder`, with its requests held."""
        await self._met()
        self._is_open.clear()
        try:
            await self._pause()
            self._updates += 1
            try:
                await self._load(folder, version)
            finally:
                await self._resume()  # also after a failure: a server that stays paused answers nobody
            self.version = version
        finally:
            self._is_open.set()

    async def revive(self) -> None:
        """Return once the server answers; start it again if it is this client's and has died or hangs.

        Raises:
            EngineGoneError: it may not be started again.
            EngineLostError: it does not answer (yet).
        """
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
        if self._keeper is not None:
            hangs = now - self._silent_since > _HUNG_AFTER * self._health_s
            if self._keeper.is_dead or hangs:
                why = f"the server at {self.url} {'hangs' if hangs else 'has died'}"
                await self._link.close()
                self._link.url = (await self._keeper.again(why)).url
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
        await self._link.close()
        if self._files is not None:
            self._files.close()
        if self._keeper is not None:
            await self._keeper.stop()

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one request was being answered."""
        return self._busy_s + (time.perf_counter() - self._busy_since if self._live else 0.0)

    def tag(self, version: int) -> str:
        """Return what the server is told to call `version` of the weights that this client sends."""
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
                if self._keeper is not None:
                    self._link.url = (await self._keeper.start()).url
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
            await asyncio.sleep(self._health_s / 2)
            if not self._is_open.is_set():  # updates have deadlines of their own
                failed = 0
                continue
            try:
                async with asyncio.timeout(self._health_s):
                    await self._look_once()
                failed = 0
            except (EngineError, TimeoutError):
                failed = failed + 1 if self._is_open.is_set() else 0
            if failed >= _NUM_LOOKS:
                self._give_up(EngineLostError(f"{self.url} takes requests and does not answer them"))
                break
        self._watch = None

    def _give_up(self, problem: EngineLostError) -> None:
        for live in self._live.values():
            live.problem = problem
            if live.sent is not None:
                live.sent.cancel()

    # One request.

    async def _ask(self, request: GenerateRequest, parts: Sequence[Completion], live: _Live) -> Completion:
        """Send `request`, continued behind the tokens of `parts`, and wait for the answer."""
        if parts:
            request = _continued(request, parts)
        live.wire_id, live.problem = uuid.uuid4().hex, None
        live.sent = asyncio.create_task(self._send(self._call(request, live.wire_id), live))
        try:
            reply = await self._within(live.sent, request.deadline, live)
        except asyncio.CancelledError:
            live.sent.cancel()
            self._background(self._abort_quietly(live.wire_id))
            task = asyncio.current_task()
            if live.problem is not None and (task is None or not task.cancelling()):
                raise live.problem from None
            raise
        except EngineLostError:
            self._background(self._abort_quietly(live.wire_id))  # the server may still be at work on it
            raise
        if reply is None:
            return Completion(  # the caller wanted an end before the server took it
                token_ids=np.empty(0, np.int32),
                logprobs=np.empty(0, np.float32),
                finish_reason=FinishReason.ABORT,
                policy_versions=((0, self.version),),
                info={"prefilled_tokens": 0},
            )
        try:
            return self._read(request, reply)
        except (KeyError, IndexError, TypeError, ValueError) as problem:
            raise EngineError(f"{self.url} answered what {self.name} does not say ({one_line(problem)})") from problem

    async def _send(self, call: Call, live: _Live) -> Any:
        """POST until the server takes it; one that is full is asked again."""
        loop = asyncio.get_running_loop()
        limit, pause = loop.time() + self._busy_limit_s, _FIRST_BUSY_PAUSE_S
        while True:
            live.is_waiting = False
            try:
                return await self._post(call.path, call.body, timeout_s=self._timeout_s)
            except EngineBusyError:
                self.num_busy += 1
                if loop.time() + pause > limit:
                    raise
            live.is_waiting = True
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_BUSY_PAUSE_S)

    def _check(self, request: GenerateRequest) -> None:
        if self._is_closed:
            raise EngineError(f"the {self.name} client of {self.url} is closed")
        if request.sampling.banned_token_ids:
            raise EngineError(
                f"request {request.request_id!r} bans token ids, and {self.name} would change its logprobs for that; leave "
                "banned_token_ids out, or use the embedded engine"
            )
        check_request(
            request,
            live=self._live,
            vocab_size=self._vocab_size,
            max_context=self._context,
            takes_media=self.capabilities.media,
        )

    @property
    def _context(self) -> int | None:
        """The longest prompt plus completion: what was said here, or the server's own limit if that is shorter."""
        own = None if self._facts is None else self._facts.max_context
        limits = [limit for limit in (self._max_context, own) if limit is not None]
        return min(limits, default=None)

    def _room(self, request: GenerateRequest) -> int:
        """Return how many tokens may be sampled: what was asked for, or what the context leaves."""
        wanted, context = request.sampling.max_tokens, self._context
        return wanted if context is None else min(wanted, context - len(request.prompt_ids))

    async def _within(self, sent: asyncio.Task[Any], deadline: float | None, live: _Live) -> Any:
        """Wait for the answer; once the deadline has passed or the caller wants an end, ask for what there is.

        Returns None where the server had not taken the request by then.
        """
        loop = asyncio.get_running_loop()
        left = None if deadline is None else max(deadline - loop.time(), 0.0)
        ended = asyncio.create_task(live.end.wait())
        try:
            await asyncio.wait({sent, ended}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        grace, pause = loop.time() + _ABORT_GRACE_S, _FIRST_ABORT_PAUSE_S
        while not sent.done():
            if live.is_waiting:
                sent.cancel()
                return None
            if loop.time() > grace:
                sent.cancel()
                raise EngineLostError(f"{self.url} did not end a request within {_ABORT_GRACE_S:.0f} s of being asked to")
            await self._abort_quietly(live.wire_id)  # again and again: the request may still have been on its way
            await asyncio.wait({sent}, timeout=pause)
            pause = min(2 * pause, _LAST_ABORT_PAUSE_S)
        return await sent

    async def _abort_quietly(self, wire_id: str) -> None:
        try:
            await self._abort(wire_id)
        except EngineError as problem:
            logger.debug("%s: a request could not be aborted (%s)", self.url, one_line(problem))

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` without holding the caller up; `close` waits for it."""
        task = asyncio.create_task(work, name=f"polyturn-{self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None) -> Any:
        return await self._link.post(path, body, timeout_s=timeout_s)


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
