"""The trainer's end of SGLang's weight updates, to any number of servers at once.

    gloo, nccl   /init_weights_update_group once, then /update_weights_from_distributed with names, and a broadcast
    ipc          /update_weights_from_tensor with handles of the trainer's memory, on the same GPU

Handles are pickled, because the route requires it; the server reads them with an unpickler restricted to tensors.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import pickle
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyturn.core.errors import EngineError
from polyturn.engines.weight_group import WeightGroup
from polyturn.engines.weight_transfer import TransferServer, on_all
from polyturn.engines.weight_transport import Transport, buckets, untied

if TYPE_CHECKING:
    from torch import Tensor

_GPU_FIELD = 6
"""Index of the GPU's number in torch's handle of a tensor; processes may number GPUs differently."""


class SglangLink:
    """The trainer's end of one transfer; implements `TransferLink`."""

    def __init__(self, servers: Sequence[TransferServer], group: WeightGroup | None) -> None:
        self._servers = servers
        self._group = group

    @classmethod
    async def open(cls, transport: Transport, servers: Sequence[TransferServer]) -> SglangLink:
        """Make the group with the servers' workers, if the transport uses one.

        Raises:
            EngineLostError: the group could not be made.
            EngineError: a server refused.
        """
        if transport == "ipc":
            return cls(servers, None)
        workers, offset = {}, 1
        for server in servers:
            workers[server] = offset
            offset += server.num_workers
        name = f"polyturn-{uuid.uuid4().hex[:8]}"
        group = WeightGroup([server.url for server in servers], name=name, backend=transport, size=offset)
        where = {"master_address": group.host, "master_port": group.port, "world_size": group.size}
        body = {**where, "group_name": name, "backend": transport}
        path = "/init_weights_update_group"
        await group.join(on_all(servers, lambda server: server.tell(path, {**body, "rank_offset": workers[server]})))
        return cls(servers, group)

    async def send(self, weights: Mapping[str, Tensor]) -> None:
        """Send the weights in buckets, in a session per server.

        Raises:
            EngineLostError: a server did not answer, or the group broke.
            EngineError: a server refused.
        """
        await self._all("/begin_weight_update", {"selector": "target"})
        try:
            pieces = iter(buckets(untied(weights)))
            while (bucket := await asyncio.to_thread(next, pieces, None)) is not None:
                await (self._hand_over(bucket) if self._group is None else self._broadcast(bucket, self._group))
        except BaseException:
            with contextlib.suppress(EngineError):  # an open session would refuse the next weights
                await self._all("/end_weight_update", {})
            raise
        await self._all("/end_weight_update", {})

    async def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            await self._all("/destroy_weights_update_group", {"group_name": self._group.name})

    async def _all(self, path: str, body: Mapping[str, Any]) -> None:
        await on_all(self._servers, lambda server: server.tell(path, body))

    async def _broadcast(self, bucket: Mapping[str, Tensor], group: WeightGroup) -> None:
        body = {
            "names": list(bucket),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()],
            "shapes": [list(tensor.shape) for tensor in bucket.values()],
            "group_name": group.name,
            "flush_cache": False,
        }
        await group.broadcast(list(bucket.values()), self._all("/update_weights_from_distributed", body))

    async def _hand_over(self, bucket: Mapping[str, Tensor]) -> None:
        import torch

        tensors = {name: tensor.cuda() for name, tensor in bucket.items()}
        torch.cuda.synchronize()  # the other process reads them on another stream

        async def give(server: TransferServer) -> None:
            # A handle can be opened once, so every process of the server gets one.
            handles = [_pickled(tensors) for _ in range(server.num_workers)]
            await server.tell("/update_weights_from_tensor", {"serialized_named_tensors": handles, "flush_cache": False})

        await on_all(self._servers, give)
        tensors.clear()
        torch.cuda.ipc_collect()


def _pickled(tensors: Mapping[str, Tensor]) -> str:
    """Return [(name, tensor)] with handles of the tensors' memory, in base64."""
    into = io.BytesIO()
    _HandlePickler(into, protocol=4).dump(list(tensors.items()))
    return base64.b64encode(into.getvalue()).decode("ascii")


class _HandlePickler(pickle.Pickler):
    """Writes tensors of a GPU as handles that name it by its UUID."""

    def reducer_override(self, obj: Any) -> Any:
        """Return the function and arguments that open a tensor."""
        import torch
        from torch.multiprocessing import reductions

        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        function, arguments = reductions.reduce_tensor(obj)
        gpu = str(torch.cuda.get_device_properties(obj.device).uuid)
        return function, (*arguments[:_GPU_FIELD], gpu, *arguments[_GPU_FIELD + 1 :])
