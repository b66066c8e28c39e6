"""WeightTransfer: new weights for all servers of a run at once, by the servers' own transfer of tensors.

    the pool       transfer.write(weights)        -> SentWeights, given to every server
    each server    SentWeights.load(server)       once all that were given them are held: one broadcast for all
    its kind       open_link(way, servers)        -> TransferLink, the trainer's end of it

Tensors stream a bucket at a time from where they are, and nothing is kept: a server that comes back is sent the trainer's
weights while these are still the ones that it missed, or else the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from polyturn.core.aio import first_error
from polyturn.core.errors import EngineError, one_line
from polyturn.engines.weight_files import ServerWeights
from polyturn.engines.weight_transport import Way

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

SETTLE_S = 60.0
"""Seconds in which a transfer that no server waits for may end before it is broken off, and in which a link is closed."""


class TransferServer(Protocol):
    """One server, as far as a transfer goes: it is held, and takes weights."""

    url: str

    @property
    def num_workers(self) -> int:
        """Processes that hold its weights, each with its share of the model."""
        ...

    async def tell(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Post to it with the time that loading may take.

        Raises:
            EngineLostError: it did not answer.
            EngineError: it refused.
        """
        ...

    async def is_as_left(self) -> bool | None:
        """Return whether its weights have the name that they were given last, which a new process does not know; None if it
        does not answer."""
        ...


class TransferLink(Protocol):
    """The trainer's end of a transfer to certain servers."""

    async def send(self, weights: Mapping[str, Any]) -> None:
        """Send name -> tensor to all of them, which load it.

        Raises:
            EngineLostError: a server did not answer, or the group broke.
            EngineError: one refused.
        """
        ...

    async def close(self) -> None:
        """Let go."""
        ...


OpenLink = Callable[[Way, Sequence[TransferServer]], Awaitable[TransferLink]]


class WeightTransfer:
    """Sends weights to servers of one kind; a `WeightStore` that keeps none."""

    keeps: ClassVar[bool] = False

    def __init__(self, transport: Way, open_link: OpenLink, *, own_model: Path | None = None) -> None:
        """Send by `transport`; `close` removes `own_model`, the folder that servers were started from."""
        self._way = transport
        self._own_model = own_model
        self._open = open_link
        self._link: TransferLink | None = None
        self._linked: tuple[TransferServer, ...] = ()
        self._turn = asyncio.Lock()

    def write(self, weights: Mapping[str, Any]) -> SentWeights:
        """Take weights that are to be sent; nothing is copied."""
        return SentWeights(weights, self)

    async def send(self, weights: Mapping[str, Any], servers: Sequence[TransferServer]) -> None:
        """Send to `servers`, over the link of the last time if these are the same ones, and still the same processes.

        Raises:
            EngineLostError, EngineError: it did not all arrive; the next one begins with a new link.
        """
        async with self._turn:
            same = set(self._linked) == set(servers) and all(await on_all(servers, lambda s: s.is_as_left()))
            if not same:
                await self._unlink()
            try:
                if self._link is None:
                    self._link, self._linked = await self._open(self._way, servers), tuple(servers)
                await self._link.send(weights)
            except BaseException:
                await self._unlink()
                raise

    async def unlink(self) -> None:
        """Let go of the servers, which their clients still reach."""
        async with self._turn:
            await self._unlink()

    async def _unlink(self) -> None:
        if self._link is not None:
            link, self._link, self._linked = self._link, None, ()
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(SETTLE_S):  # of a server that hangs, which would hold the end of the run up
                    await link.close()

    def drop(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Remove the model's folder; the servers' clients unlink as they are closed."""
        if self._own_model is not None:
            shutil.rmtree(self._own_model, ignore_errors=True)


class SentWeights(ServerWeights):
    """Weights that are sent to all servers that were given them."""

    is_all_or_nothing: ClassVar[bool] = False

    def __init__(self, weights: Mapping[str, Any], transfer: WeightTransfer) -> None:
        self._weights: Mapping[str, Any] | None = weights
        self._transfer = transfer
        self._given: set[TransferServer] = set()
        self._ready: dict[TransferServer, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def given_to(self, server: TransferServer) -> Iterator[None]:
        """Make the others wait for `server`, until it is held or its update has failed."""
        self._given.add(server)
        try:
            yield
        finally:
            self._given.discard(server)
            self._ready.pop(server, None)  # of a `load` that was cancelled before the others were held
            self._begin()

    async def load(self, server: TransferServer) -> None:
        """Wait for the others, and for the transfer to all.

        Raises:
            EngineLostError: this server was lost on the way.
            EngineError: it refused, or the trainer's weights are others by now.
        """
        done = self._ready[server] = asyncio.get_running_loop().create_future()
        self._begin()
        await done

    async def settle(self) -> None:
        """Begin no transfer any more, and wait for the end of those that a cancelled `load` left behind."""
        self._weights = None
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=SETTLE_S)
        for task in late:
            logger.warning("weights are still sent %g s after their server was given up, and are broken off", SETTLE_S)
            task.cancel()

    def _begin(self) -> None:
        if self._ready and self._given <= self._ready.keys():
            ready, self._ready = self._ready, {}
            self._given -= ready.keys()
            task = asyncio.create_task(self._send(ready), name="weights to servers")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send(self, ready: dict[TransferServer, asyncio.Future[None]]) -> None:
        """Send to all; where some are lost on the way, to the others again."""
        try:
            while ready:
                problem: EngineError | None = None
                receivers = list(ready)
                try:
                    if self._weights is None:
                        raise EngineError("the weights that it was to be sent are not kept; it gets the next ones")
                    await self._transfer.send(self._weights, receivers)
                except EngineError as caught:
                    problem = caught
                    left = await on_all(receivers, lambda server: server.is_as_left())
                    lost = [server for server, is_as_left in zip(receivers, left, strict=True) if is_as_left is None]
                    if lost and len(lost) < len(receivers):
                        logger.warning("weights go to %d servers again (%s)", len(receivers) - len(lost), one_line(problem))
                        receivers = lost
                _resolve([ready.pop(server) for server in receivers], problem)
        except Exception as problem:  # of the trainer, such as a lost rank or memory that ran out: every `load` raises it
            _resolve(ready.values(), problem)


def _resolve(updates: Iterable[asyncio.Future[None]], problem: Exception | None) -> None:
    """End the waits of `load` on a transfer that arrived, or failed with `problem`."""
    for done in updates:
        if done.done():  # its update was cancelled
            continue
        if problem is None:
            done.set_result(None)
        else:
            done.set_exception(problem)


async def on_all(servers: Sequence[TransferServer], call: Callable[[TransferServer], Coroutine[Any, Any, _T]]) -> list[_T]:
    """Return the results of `call` on each server, all at once.

    Raises:
        EngineError: the first that one raised.
    """
    with first_error():
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(call(server)) for server in servers]
    return [done.result() for done in calls]
