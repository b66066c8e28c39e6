"""Links for vLLM's weight transfer, to any number of servers at once.

    init_weight_transfer_engine                    once: the trainer and the workers of all servers make a group
    start -> update_weights -> finish              per sync: calls name tensors, broadcasts send them

`VllmLink` goes through these phases over gloo or nccl. For gloo, the servers load `server_side/polyturn_vllm_gloo.py`. For
nccl, the trainer's end of the group is vLLM's communicator. Over ipc there is no group: vLLM's trainer engine sends handles
of the trainer's memory, and `VllmMemoryLink` passes this engine's calls on to every server.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyturn.core.errors import EngineError, EngineLostError, one_line
from polyturn.engines.weights.group import GroupLink, WeightGroup
from polyturn.engines.weights.stream import BUCKET_BYTES, streamed
from polyturn.engines.weights.transfer import TransferServer, on_all
from polyturn.infra.aio import OneThread

if TYPE_CHECKING:
    from torch import Tensor


class VllmLink(GroupLink):
    """A link over gloo or nccl."""

    @property
    def group_kind(self) -> type[WeightGroup]:
        """The trainer's end of the group."""
        return VllmGroup if self.transport == "nccl" else WeightGroup

    async def _join(self, server: TransferServer, rank_offset: int) -> Any:
        info = {**self._meeting, "rank_offset": rank_offset}
        if self.transport == "gloo":
            info["group_name"] = self._group_name
        return await server.tell("/init_weight_transfer_engine", {"init_info": info})

    async def _begin(self) -> None:
        try:
            await self._all("/start_weight_update")
        except EngineError:  # an update was interrupted
            await self._all("/finish_weight_update")
            await self._all("/start_weight_update")

    async def _receive(self, kinds: dict[str, Any], dtypes: list[str]) -> None:
        await self._all("/update_weights", {"update_info": {**kinds, "dtype_names": dtypes}})

    async def _finish(self) -> None:
        await self._all("/finish_weight_update")

    async def _leave(self) -> None:
        await self._all("/shutdown_weight_transfer_engine")


class VllmGroup(WeightGroup):
    """The trainer's membership of an nccl group, with vLLM's communicator."""

    def _open_store(self) -> int:
        with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET) as probe:
            probe.bind((self.host, 0))
            return int(probe.getsockname()[1])

    def _join(self) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        where = {"master_address": self.host, "master_port": self.port, "world_size": self.spec.size}
        self._group = trainer_init(where)  # opens the store too

    def _send(self, tensors: Sequence[Tensor]) -> None:
        import torch

        for tensor in tensors:
            self._group.broadcast(tensor, src=0)
        torch.cuda.synchronize(self.device)  # before the optimizer changes the tensors

    def _abort(self, group: Any) -> None:
        group.destroy()  # ncclCommAbort

    def _destroy(self, group: Any) -> None:
        group.destroy()


class VllmMemoryLink:
    """A link over ipc from the training process to servers on its GPU; implements `TransferLink`."""

    def __init__(self, servers: Sequence[TransferServer]) -> None:
        self._source = _Source()
        self._phases = _Phases(servers)
        self._thread = OneThread("polyturn-weight-transfer")
        """A daemon thread, so that waiting for a dead server does not delay the end of the run."""
        self._engine: Any = None

    @classmethod
    async def open(cls, servers: Sequence[TransferServer]) -> VllmMemoryLink:
        """Prepare the servers' workers.

        Raises:
            EngineLostError: a server did not answer.
            EngineError: a server refused, because it was started with another backend.
        """
        link = cls(servers)
        link._engine = await link._thread.submit(link._join)
        return link

    async def send(self, weights: Mapping[str, Tensor]) -> None:
        """Send the weights.

        Raises:
            EngineLostError: a server did not answer.
            EngineError: a server refused.
        """
        self._source.weights = streamed(weights)
        try:
            await self._thread.submit(self._engine.send_weights)
        except (EngineError, RuntimeError, ValueError) as problem:
            with contextlib.suppress(EngineError):  # a server in the middle of an update would crash at its next request
                await self._phases.tell_all("/finish_weight_update")
            if isinstance(problem, EngineError):
                raise
            raise EngineLostError(f"the ipc transfer to the servers broke ({one_line(problem)})") from problem
        finally:
            self._source.weights = streamed({})

    async def close(self) -> None:
        """End the transfer."""
        if self._engine is not None:
            self._engine.shutdown()
            await self._phases.tell_all("/shutdown_weight_transfer_engine")

    def _join(self) -> Any:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        info = IPCTrainerInitInfo(packed=True, rank=0, packed_buffer_size_bytes=BUCKET_BYTES)
        return WeightTransferTrainerFactory.trainer_init(info, client=self._phases, source=self._source)


class _Source:
    """The weights as vLLM's `WeightSource`."""

    def __init__(self) -> None:
        self.weights = streamed({})

    def metadata(self) -> list[Any]:
        """Return name, type and shape of each tensor, without fetching it."""
        from vllm.distributed.weight_transfer import ParamMeta

        return [ParamMeta(name, kind.dtype, kind.shape) for name, kind in self.weights.kinds.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights.items():
            yield name, tensor.cuda()


class _Phases:
    """Sends the calls of vLLM's trainer engine to all servers; implements `VLLMWeightSyncClient`.

    Calls come from a thread, and run on the event loop of the servers' clients.
    """

    def __init__(self, servers: Sequence[TransferServer]) -> None:
        self._servers = servers
        self._loop = asyncio.get_running_loop()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Prepare every worker."""
        self._call("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Start an update on all servers, including one whose last update was interrupted."""
        try:
            self._call("/start_weight_update")
        except EngineError:
            self._call("/finish_weight_update")
            self._call("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Make all servers load the named tensors."""
        from vllm.distributed.weight_transfer.clients import _json_safe_update_payload

        self._call("/update_weights", {"update_info": _json_safe_update_payload(update_info)})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish the update on all servers."""
        self._call("/finish_weight_update")

    async def tell_all(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Post to all servers concurrently."""
        await on_all(self._servers, lambda server: server.tell(path, body or {}))

    def _call(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        asyncio.run_coroutine_threadsafe(self.tell_all(path, body), self._loop).result()
