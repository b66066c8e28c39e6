"""The trainer's end of vLLM's weight transfer, to any number of servers at once.

    init_weight_transfer_engine                    once: the trainer and the workers of all servers make a group
    start -> update_weights -> finish              each time: a call with names, and a broadcast

Over gloo (`server_side/polyturn_vllm_gloo.py` in the servers) `GlooLink` drives these phases. Over nccl and ipc, the trainer
engine of the package `vllm` does; `VllmLink` gives it the weights and sends its calls to every server.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyturn.core.errors import EngineError, EngineLostError, one_line
from polyturn.engines.weight_group import GroupLink
from polyturn.engines.weight_transfer import TransferServer, on_all
from polyturn.engines.weight_transport import BUCKET_BYTES, Transport, address_towards, kinds_of, untied
from polyturn.infra.aio import OneThread

if TYPE_CHECKING:
    from torch import Tensor


class GlooLink(GroupLink):
    """The trainer's end over gloo."""

    async def _join(self, server: TransferServer, rank_offset: int) -> Any:
        group = self._group
        where = {"master_address": group.host, "master_port": group.port, "world_size": group.size}
        info = {**where, "group_name": group.name, "rank_offset": rank_offset}
        return await server.tell("/init_weight_transfer_engine", {"init_info": info})

    async def _begin(self) -> None:
        try:
            await self._all("/start_weight_update")
        except EngineError:  # an update was interrupted
            await self._all("/finish_weight_update")
            await self._all("/start_weight_update")

    async def _receive(self, kinds: dict[str, Any], dtypes: list[str]) -> None:
        await self._all("/update_weights", {"update_info": {**kinds, "dtype_names": dtypes}})

    async def _end(self) -> None:
        await self._all("/finish_weight_update")

    async def _leave(self) -> None:
        await self._all("/shutdown_weight_transfer_engine")


class VllmLink:
    """The trainer's end over nccl or ipc; implements `TransferLink`."""

    def __init__(self, transport: Transport, servers: Sequence[TransferServer]) -> None:
        self._transport = transport
        self._source = _Source()
        self._phases = _Phases(servers)
        self._thread = OneThread("polyturn-weight-transfer")
        """A daemon thread, so that waiting for a dead server does not delay the end."""
        self._engine: Any = None

    @classmethod
    async def open(cls, transport: Transport, servers: Sequence[TransferServer]) -> VllmLink:
        """Make the group with the servers' workers.

        Raises:
            EngineLostError: the group could not be made.
            EngineError: a server refused, because it was started with another backend.
        """
        link = cls(transport, servers)
        link._engine = await link._run(link._join)
        return link

    async def send(self, weights: Mapping[str, Tensor]) -> None:
        """Send the weights.

        Raises:
            EngineLostError: a server did not answer, or the group broke.
            EngineError: a server refused.
        """
        self._source.weights = untied(weights)
        try:
            await self._run(self._engine.send_weights)
        except EngineError:
            with contextlib.suppress(EngineError):  # a server in the middle of an update would crash at its next request
                await self._phases.tell_all("/finish_weight_update")
            raise
        finally:
            self._source.weights = {}

    async def close(self) -> None:
        """Leave the group."""
        if self._engine is not None:
            self._engine.shutdown()
            await self._phases.tell_all("/shutdown_weight_transfer_engine")

    def _join(self) -> Any:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        servers = self._phases.servers
        host = address_towards([server.url for server in servers])
        size = 1 + sum(server.num_workers for server in servers)
        info = _init_info(self._transport, host, size)
        return WeightTransferTrainerFactory.trainer_init(info, client=self._phases, source=self._source)

    async def _run(self, work: Callable[[], Any]) -> Any:
        """Run the trainer's side in a thread; if a server fails, leave the thread to its time limit."""
        failed = self._phases.begin()
        own = self._thread.submit(work)
        await asyncio.wait({own, failed}, return_when=asyncio.FIRST_COMPLETED)
        if failed.done() and (problem := failed.exception()) is not None:
            own.cancel()
            raise problem
        failed.cancel()
        try:
            return await own
        except EngineError:
            raise
        except (RuntimeError, ValueError) as broke:
            raise EngineLostError(f"the {self._transport} transfer to the servers broke ({one_line(broke)})") from broke


class _Source:
    """The weights as vLLM's `WeightSource`."""

    def __init__(self) -> None:
        self.weights: Mapping[str, Tensor] = {}

    def metadata(self) -> list[Any]:
        """Return name, type and shape of each tensor, without fetching it."""
        from vllm.distributed.weight_transfer import ParamMeta

        return [ParamMeta(name, kind.dtype, kind.shape) for name, kind in kinds_of(self.weights).items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights.items():
            yield name, tensor.cuda()


class _Phases:
    """Sends the calls of vLLM's trainer engine to all servers; implements `VLLMWeightSyncClient`.

    Calls come from threads, and run on the event loop of the servers' clients.
    """

    def __init__(self, servers: Sequence[TransferServer]) -> None:
        self.servers = servers
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._loop.create_future()

    def begin(self) -> asyncio.Future[None]:
        """Return a future that fails as soon as a call fails."""
        self._failed = self._loop.create_future()
        return self._failed

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Make every worker join, numbered server by server."""
        bodies, offset = [], init_info.get("rank_offset", 0)
        for server in self.servers:
            bodies.append({"init_info": {**init_info, "rank_offset": offset} if "rank_offset" in init_info else init_info})
            offset += server.num_workers
        self._call("/init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        """Start an update on all servers, including one whose last update was interrupted."""
        try:
            self._call("/start_weight_update", is_final=False)
        except EngineError:
            self._call("/finish_weight_update", is_final=False)
            self._call("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Make all servers receive the named tensors."""
        from vllm.distributed.weight_transfer.clients import _json_safe_update_payload

        self._call("/update_weights", [{"update_info": _json_safe_update_payload(update_info)}] * len(self.servers))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish the update on all servers."""
        self._call("/finish_weight_update")

    async def tell_all(self, path: str, bodies: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Post to all servers concurrently."""
        of = dict(zip(self.servers, bodies or [{}] * len(self.servers), strict=True))
        await on_all(self.servers, lambda server: server.tell(path, of[server]))

    def _call(self, path: str, bodies: Sequence[Mapping[str, Any]] | None = None, *, is_final: bool = True) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self.tell_all(path, bodies), self._loop).result()
        except EngineError as problem:
            if is_final:
                self._loop.call_soon_threadsafe(self._fail, problem)
            raise

    def _fail(self, problem: EngineError) -> None:
        if not self._failed.done():
            self._failed.set_exception(problem)


def _init_info(transport: Transport, host: str, size: int) -> Any:
    """Return the arguments of vLLM's trainer engine for a backend."""
    shared: dict[str, Any] = {"rank": 0, "packed_buffer_size_bytes": BUCKET_BYTES}
    if transport == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(packed=True, **shared)
    where = {"master_address": host, "master_port": _free_port(host), "world_size": size}
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(**where, **shared)


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
