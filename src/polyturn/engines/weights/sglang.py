"""The trainer's end of SGLang's weight updates, to any number of servers at once.

    gloo, nccl   /init_weights_update_group once, then /update_weights_from_distributed with names, and a broadcast
    ipc          /update_weights_from_tensor with handles of the trainer's memory, on the same GPU
    adapter      /load_lora_adapter_from_tensors with the tensors themselves, to a server that does not see their folder

Handles and tensors in a request are pickled, because the routes require it; the server reads them with an unpickler
restricted to tensors.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from polyturn.engines.weights.group import GroupLink
from polyturn.engines.weights.stream import TensorKind, Transport
from polyturn.engines.weights.transfer import TransferServer, on_all

if TYPE_CHECKING:
    from torch import Tensor

_GPU_FIELD = 6
"""Index of the GPU's number in torch's handle of a tensor; processes may number GPUs differently."""


class SglangLink(GroupLink):
    """The trainer's end over gloo or nccl."""

    async def _join(self, server: TransferServer, rank_offset: int) -> Any:
        own = {"group_name": self._group_name, "backend": self.transport, "rank_offset": rank_offset}
        return await server.tell("/init_weights_update_group", {**self._meeting, **own})

    async def _begin(self) -> None:
        await self._all("/begin_weight_update", {"selector": "target"})

    async def _receive(self, kinds: dict[str, Any], dtypes: list[str]) -> None:
        body = {**kinds, "dtypes": dtypes, "group_name": self._group_name, "flush_cache": False}
        await self._all("/update_weights_from_distributed", body)

    async def _finish(self) -> None:
        await self._all("/end_weight_update")

    async def _leave(self) -> None:
        await self._all("/destroy_weights_update_group", {"group_name": self._group_name})


class SglangMemoryLink(SglangLink):
    """The trainer's end by handles of its memory, on the same GPU; there is no group."""

    @classmethod
    async def open(cls, transport: Transport, servers: Sequence[TransferServer], weights: Mapping[str, Tensor]) -> Self:
        """Do nothing: there is no group."""
        return cls(transport, servers)

    async def close(self) -> None:
        """Do nothing: handles live as long as one bucket."""

    async def _give(self, names: Sequence[str], kinds: Mapping[str, TensorKind]) -> None:
        import torch

        tensors = {name: self._weights[name].cuda() for name in names}
        torch.cuda.synchronize()  # the other process reads them on another stream

        async def give(server: TransferServer) -> None:
            # A handle can be opened only once, so every process of the server gets its own.
            handles = [_pickled(tensors) for _ in range(server.num_workers)]
            await server.tell("/update_weights_from_tensor", {"serialized_named_tensors": handles, "flush_cache": False})

        await on_all(self._servers, give)
        tensors.clear()
        torch.cuda.ipc_collect()


def packed_adapter(folder: Path, num_workers: int) -> dict[str, Any]:
    """Return the adapter in `folder`, in peft's format, as the body of /load_lora_adapter_from_tensors: each of the server's
    processes reads its own copy."""
    from safetensors.torch import load_file

    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    data = base64.b64encode(pickle.dumps(tensors, protocol=4)).decode("ascii")
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    return {"config_dict": config, "serialized_named_tensors": [data] * num_workers}


def _pickled(tensors: Mapping[str, Tensor]) -> str:
    """Return [(name, tensor)] with handles of the tensors' memory, in base64."""
    into = io.BytesIO()
    _HandlePickler(into, protocol=4).dump(list(tensors.items()))
    return base64.b64encode(into.getvalue()).decode("ascii")


class _HandlePickler(pickle.Pickler):
    """Writes tensors of a GPU as handles that name the GPU by its UUID."""

    def reducer_override(self, obj: Any) -> Any:
        """Return the function and arguments that open a tensor."""
        import torch
        from torch.multiprocessing import reductions

        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        function, arguments = reductions.reduce_tensor(obj)
        gpu = str(torch.cuda.get_device_properties(obj.device).uuid)
        return function, (*arguments[:_GPU_FIELD], gpu, *arguments[_GPU_FIELD + 1 :])
