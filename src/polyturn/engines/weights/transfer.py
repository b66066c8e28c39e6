"""WeightTransfer: send new weights to all servers of a run at once, by the servers' transfer of tensors.

    the pool       transfer.write(weights)        -> SentWeights, given to every server
    each server    SentWeights.load(server)       waits until all of these servers are paused: one broadcast for all
    its client     open_link(transport, servers, weights)  -> TransferLink, which sends these weights and later ones

Tensors are streamed in buckets, and no copy is kept. A server that comes back is sent the trainer's weights if these are
still the missed version, otherwise the next version.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from polyturn.core.errors import EngineError, one_line
from polyturn.engines.weights.folder import ServerWeights
from polyturn.engines.weights.stream import Transport
from polyturn.infra.aio import first_error

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

SETTLE_S = 60.0
"""Seconds to wait for the end of an abandoned transfer, or for closing a link, before breaking it off."""


class TransferServer(Protocol):
    """A paused server, as seen by a transfer."""

    url: str

    @property
    def num_workers(self) -> int:
        """Number of processes with weights, each with a share of the model."""
        ...

    async def tell(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Post to the server with the deadline for loading weights.

        Raises:
            EngineLostError: the server did not answer.
            EngineError: the server refused.
        """
        ...

    async def is_as_left(self) -> bool | None:
        """Return whether the server's weights still have the name that its client set last; None if the server does not
        answer. A restarted server does not have that name."""
        ...


class TransferLink(Protocol):
    """Sends the weights of one trainer to certain servers."""

    async def send(self, weights: Mapping[str, Any]) -> None:
        """Send name -> tensor to all servers, which load them.

        Raises:
            EngineLostError: a server did not answer, or the group broke.
            EngineError: one refused.
        """
        ...

    async def close(self) -> None:
        """Disconnect from the servers."""
        ...


OpenLink = Callable[[Transport, Sequence[TransferServer], Mapping[str, Any]], Awaitable[TransferLink]]


class WeightTransfer:
    """Sends weights to servers of one kind; a `WeightStore` that keeps no copy."""

    keeps: ClassVar[bool] = False

    def __init__(self, transport: Transport, open_link: OpenLink, *, own_model: Path | None = None) -> None:
        """Send by `transport`; `close` removes `own_model`, the model folder of the servers."""
        self.transport = transport
        self._own_model = own_model
        self._open = open_link
        self._link: TransferLink | None = None
        self._linked: tuple[TransferServer, ...] = ()
        self._turn = asyncio.Lock()

    def write(self, weights: Mapping[str, Any]) -> SentWeights:
        """Prepare to send weights, without a copy."""
        return SentWeights(weights, self)

    async def send(self, weights: Mapping[str, Any], servers: Sequence[TransferServer]) -> None:
        """Send to `servers`, over the previous link if they are the same servers and processes.

        Raises:
            EngineLostError, EngineError: not all weights arrived; the next call opens a new link.
        """
        async with self._turn:
            same = set(self._linked) == set(servers) and all(await on_all(servers, lambda s: s.is_as_left()))
            if not same:
                await self._unlink()
            try:
                if self._link is None:
                    self._link, self._linked = await self._open(self.transport, servers, weights), tuple(servers)
                await self._link.send(weights)
            except BaseException:
                await self._unlink()
                raise

    async def unlink(self) -> None:
        """Close the link, while the servers' clients are still open."""
        async with self._turn:
            await self._unlink()

    async def _unlink(self) -> None:
        if self._link is not None:
            link, self._link, self._linked = self._link, None, ()
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(SETTLE_S):  # a server that hangs must not delay the end of the run
                    await link.close()

    def drop(self) -> None:
        """Do nothing, because no copy is kept."""

    def close(self) -> None:
        """Remove the model's folder; the servers' clients close the link."""
        if self._own_model is not None:
            shutil.rmtree(self._own_model, ignore_errors=True)


class SentWeights(ServerWeights):
    """Weights to send to all servers that are being updated."""

    is_all_or_nothing: ClassVar[bool] = False

    def __init__(self, weights: Mapping[str, Any], transfer: WeightTransfer) -> None:
        self._weights: Mapping[str, Any] | None = weights
        self._transfer = transfer
        self._given: set[TransferServer] = set()
        self._ready: dict[TransferServer, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def given_to(self, server: TransferServer) -> Iterator[None]:
        """Make other servers wait for `server` until it is paused or its update has failed."""
        self._given.add(server)
        try:
            yield
        finally:
            self._given.discard(server)
            self._ready.pop(server, None)  # left by a `load` that was cancelled before the other servers were paused
            self._begin()

    async def load(self, server: TransferServer) -> None:
        """Wait for the other servers, and for the transfer to all.

        Raises:
            EngineLostError: this server was lost during the transfer.
            EngineError: the server refused, or the trainer's weights have changed.
        """
        done = self._ready[server] = asyncio.get_running_loop().create_future()
        self._begin()
        await done

    async def settle(self) -> None:
        """Start no further transfer, and wait for the end of transfers left by a cancelled `load`."""
        self._weights = None
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=SETTLE_S)
        for task in late:
            logger.warning(
                "a transfer of weights to an abandoned server is still running after %g s and is broken off", SETTLE_S
            )
            task.cancel()

    def _begin(self) -> None:
        if self._ready and self._given <= self._ready.keys():
            ready, self._ready = self._ready, {}
            self._given -= ready.keys()
            task = asyncio.create_task(self._send(ready), name="weights to servers")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send(self, ready: dict[TransferServer, asyncio.Future[None]]) -> None:
        """Send to all servers; if some are lost during the transfer, send to the others again."""
        try:
            while ready:
                problem: EngineError | None = None
                receivers = list(ready)
                try:
                    if self._weights is None:
                        raise EngineError(
                            "the weights of this update are no longer available; the server gets the next ones"
                        )
                    await self._transfer.send(self._weights, receivers)
                except EngineError as caught:
                    problem = caught
                    left = await on_all(receivers, lambda server: server.is_as_left())
                    lost = [server for server, is_as_left in zip(receivers, left, strict=True) if is_as_left is None]
                    if lost and len(lost) < len(receivers):
                        logger.warning("weights go to %d servers again (%s)", len(receivers) - len(lost), one_line(problem))
                        receivers = lost
                _resolve([ready.pop(server) for server in receivers], problem)
        except (
            Exception
        ) as problem:  # an error of the trainer, such as a lost rank or missing memory: every `load` raises it
            _resolve(ready.values(), problem)


def _resolve(updates: Iterable[asyncio.Future[None]], problem: Exception | None) -> None:
    """Resolve the futures of `load` for a transfer that finished, or failed with `problem`."""
    for done in updates:
        if done.done():  # its update was cancelled
            continue
        if problem is None:
            done.set_result(None)
        else:
            done.set_exception(problem)


async def on_all(servers: Sequence[TransferServer], call: Callable[[TransferServer], Coroutine[Any, Any, _T]]) -> list[_T]:
    """Return the results of concurrent `call`s on each server.

    Raises:
        EngineError: the first one raised.
    """
    with first_error():
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(call(server)) for server in servers]
    return [done.result() for done in calls]
