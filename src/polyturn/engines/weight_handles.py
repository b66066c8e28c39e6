"""Weights handed to a server on this machine as handles: it opens the memory that they lie in, and no bytes are sent.

    SharedBucket({"q_proj": …, "k_proj": …})   one block of memory, [ q_proj | k_proj ]
        .handle()     where it lies, as plain values: for a server that runs our own code, which opens it without pickle
        .pickled()    the same as a pickle of named tensors: the format of a server whose own route takes these

On a GPU a handle is one of CUDA's, and the weights never leave the GPU; between processors it is the name of a file in
shared memory, which torch's manager of such files removes when both ends have let go, or have died. Every handle is opened
once: what counts the holders is made with it, so a server of several processes gets one for each.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_ALIGN = 64
_GPU_FIELD = 6
"""The place of the GPU's number in torch's handle of a tensor; another process may count GPUs in another order."""


class SharedBucket:
    """Tensors in one block of memory that other processes on this machine can open."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors` into a block: on a GPU if that is where they are."""
        import torch

        self.places: list[tuple[str, str, list[int], int]] = []
        """(name, dtype, shape, first byte)"""
        size = 0
        for name, tensor in tensors.items():
            self.places.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size))
            size = -(-(size + tensor.nbytes) // _ALIGN) * _ALIGN
        on_gpu = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        self._memory = torch.empty(max(size, _ALIGN), dtype=torch.uint8, device=min(on_gpu, key=str) if on_gpu else "cpu")
        if not on_gpu:
            self._memory.untyped_storage()._share_filename_cpu_()  # before anything lies in it: this moves it
        self._tensors = self._cut()
        for name, view in self._tensors.items():
            view.copy_(tensors[name].detach())
        if on_gpu:
            torch.cuda.synchronize(self._memory.device)  # the other process reads it on a stream of its own

    def handle(self) -> dict[str, Any]:
        """Return where the block lies, for one process to open once."""
        from torch.multiprocessing.reductions import reduce_tensor

        if not self._memory.is_cuda:
            manager, name, size = self._share_file()
            return {"kind": "file", "manager": _text(manager), "name": _text(name), "size": size}
        _, said = reduce_tensor(self._memory)
        memory, block_size, block_offset, _, counter, counter_offset, event, waits = said[_GPU_FIELD + 1 :]
        return {
            "kind": "cuda",
            "gpu": _uuid(self._memory),
            "size": self._memory.numel(),
            "offset": said[3],
            "memory": _text(memory),
            "block_size": block_size,
            "block_offset": block_offset,
            "counter": _text(counter),
            "counter_offset": counter_offset,
            "event": _text(event),
            "waits": waits,
        }

    def pickled(self) -> str:
        """Return [(name, tensor)] pickled for one process to open once, in base64."""
        into = io.BytesIO()
        _HandlePickler(into, self).dump(list(self._tensors.items()))
        return base64.b64encode(into.getvalue()).decode("ascii")

    def close(self) -> None:
        """Let go of the block. The other processes must be done with it."""
        import torch

        was_on_gpu = self._memory.is_cuda
        self._tensors.clear()
        self._memory = torch.empty(0)
        if was_on_gpu:
            torch.cuda.ipc_collect()

    def _share_file(self) -> tuple[bytes, bytes, int]:
        storage = self._memory.untyped_storage()
        manager, name, size = storage._share_filename_cpu_()
        storage._shared_incref()  # for whoever opens it, who takes it off again
        return manager, name, size

    def _cut(self) -> dict[str, Tensor]:
        from polyturn.engines.server_side.polyturn_weights import cut

        return cut(self._memory, self.places)


class _HandlePickler(pickle.Pickler):
    """Writes tensors over one block of memory as handles."""

    def __init__(self, into: io.BytesIO, bucket: SharedBucket) -> None:
        super().__init__(into, protocol=4)
        self._bucket = bucket
        self._typed: dict[Any, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Say how a tensor, or the memory behind it, is opened; the memory once, however many tensors lie in it."""
        import torch
        from torch.multiprocessing import reductions

        if isinstance(obj, torch.Tensor) and obj.is_cuda:
            function, said = reductions.reduce_tensor(obj)
            return function, (*said[:_GPU_FIELD], _uuid(obj), *said[_GPU_FIELD + 1 :])
        if isinstance(obj, torch.Tensor):
            storage = self._typed.setdefault(obj.dtype, obj._typed_storage())
            return reductions.rebuild_tensor, (
                torch.Tensor,
                storage,
                (obj.storage_offset(), obj.size(), obj.stride(), False),
            )
        if isinstance(obj, torch.TypedStorage):
            return reductions.rebuild_typed_storage, (self._typed.setdefault("block", obj._untyped_storage), obj.dtype)
        if isinstance(obj, torch.UntypedStorage):
            return reductions.rebuild_storage_filename, (torch.UntypedStorage, *self._bucket._share_file())
        return NotImplemented


def _uuid(tensor: Tensor) -> str:
    import torch

    return str(torch.cuda.get_device_properties(tensor.device).uuid)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
