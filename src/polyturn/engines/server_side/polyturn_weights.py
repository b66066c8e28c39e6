"""What both ends of a weight sync do alike: fold tensors into checksums, and open memory that another process holds.

    fold([0.5, -1.0, 0.0])  =  mix(0x3f000000) + mix(0xbf800000) + 0      modulo 2**64

A fold does not depend on order and is additive: the fold of a fused matrix is the sum of those of its parts, that of a
matrix cut over ranks the sum of those of its shards, and rows of padding (zeros) count for nothing. So a server's fused and
sharded tensors can be held to the trainer's without knowing how the server lays them out.

The trainer imports this file as part of polyturn; servers find it on their PYTHONPATH, so it needs torch alone.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

PREFIX = "polyturn1"
"""Begins each checksum that is one of ours, and changes with the way they are made."""
_PIECE = 2**22
_MIX = (-7046029254386353131, -4417276706812531889)
"""Two odd numbers with well spread bits (0x9E3779B97F4A7C15 and 0xC2B2AE3D27D4EB4F as signed)."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fold(tensor: torch.Tensor) -> int:
    """Return the sum over all elements of a mix of each one's bits, modulo 2**64; 0 for zeros."""
    bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for piece in bits.split(_PIECE):
        mixed = piece.to(torch.int64, copy=True).mul_(_MIX[0])
        mixed = mixed.bitwise_xor_(mixed >> 31).mul_(_MIX[1])
        total += mixed.bitwise_xor_(mixed >> 29).sum()
    return int(total) % 2**64


def written(tensor: torch.Tensor) -> str:
    """Return a tensor's checksum as a server says it: "polyturn1 bfloat16 00f3…"."""
    return f"{PREFIX} {str(tensor.dtype).removeprefix('torch.')} {fold(tensor):016x}"


def checksums(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return name -> checksum of each floating-point tensor that is there."""
    return {name: written(tensor) for name, tensor in named if tensor.is_floating_point() and tensor.numel()}


def open_shared(handle: Mapping[str, Any]) -> torch.Tensor:
    """Return [bytes] the memory of another process behind `handle`, as `polyturn.engines.weight_handles` makes it."""
    from torch.multiprocessing import reductions

    if handle["kind"] == "file":
        storage = reductions.rebuild_storage_filename(
            torch.UntypedStorage, _data(handle["manager"]), _data(handle["name"]), handle["size"]
        )
        return torch.empty(0, dtype=torch.uint8).set_(storage)
    shape, offset = (handle["size"],), handle["offset"]
    block = (_device(handle["gpu"]), _data(handle["memory"]), handle["block_size"], handle["block_offset"], False)
    counter = (_data(handle["counter"]), handle["counter_offset"], _data(handle["event"]), handle["waits"])
    return reductions.rebuild_cuda_tensor(
        torch.Tensor, shape, (1,), offset, torch.storage.TypedStorage, torch.uint8, *block, *counter
    )


def cut(memory: torch.Tensor, places: Sequence[Sequence[Any]]) -> dict[str, torch.Tensor]:
    """Return name -> tensor over `memory`; a place is (name, dtype, shape, first byte)."""
    found = {}
    for name, dtype, shape, start in places:
        kind = getattr(torch, dtype)
        length = torch.Size(shape).numel() * kind.itemsize
        found[name] = memory[start : start + length].view(kind).view(shape)
    return found


def _device(uuid: str) -> int:
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise ValueError(f"the trainer's GPU {uuid} is not one that this server sees")


def _data(text: str) -> bytes:
    return base64.b64decode(text)
