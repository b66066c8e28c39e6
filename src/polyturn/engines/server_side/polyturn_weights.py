"""Shared by both ends of a weight sync: fold tensors into checksums.

    fold([0.5, -1.0, 0.0])  =  mix(0x3f000000) + mix(0xbf800000) + 0      modulo 2**32, with two different mixes

A fold does not depend on order and is additive: the fold of a fused matrix is the sum of those of its parts, that of a
matrix cut over ranks the sum of those of its shards, and rows of padding (zeros) count for nothing. So a server's fused and
sharded tensors can be held to the trainer's without knowing how the server lays them out.

The mixes are one-to-one, so a single element that differs always shows. They consist of multiplications alone, which
processors do in parallel, where shifts and wider integers take ten times as long there.

The trainer imports this file as part of polyturn; servers find it on their PYTHONPATH, so it needs torch alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

PREFIX = "polyturn1"
"""Begins each checksum that is one of ours, and changes with the way they are made."""
_LANE = 2**32
_PIECES = {"cpu": 2**15}
"""Elements at a time: on a processor as many as stay in its cache."""
_LARGE_PIECE = 2**24


class _Mix(NamedTuple):
    """y = x (a + b x) xor k, then y (c + d y), less the same of 0: one-to-one modulo 2**32, as b and d are even."""

    a: int
    b: int
    k: int
    c: int
    d: int


_MIXES = (
    _Mix(1640531535, 739982446, 1013904223, 1103515245, 668265264),
    _Mix(1597334677, 374761394, 1540483477, 2024263253, 461845906),
)


def fold(tensor: torch.Tensor) -> int:
    """Return two sums over all elements of a mix of each one's bits, modulo 2**32 each; 0 for zeros."""
    flat = tensor.detach().contiguous().view(-1)
    sums = torch.zeros(len(_MIXES), dtype=torch.int32, device=flat.device)
    for piece in flat.split(_PIECES.get(flat.device.type, _LARGE_PIECE)):
        bits = (piece if piece.element_size() >= 4 else piece.to(torch.float32)).view(torch.int32)
        for lane, mix in enumerate(_MIXES):
            mixed = (bits * mix.b).add_(mix.a).mul_(bits).bitwise_xor_(mix.k)
            sums[lane] += (mixed * mix.d).add_(mix.c).mul_(mixed).sum(dtype=torch.int32)
    count = flat.numel() * max(1, flat.element_size() // 4)
    totals = [int(total) - count * mix.k * (mix.c + mix.d * mix.k) for total, mix in zip(sums, _MIXES, strict=True)]
    return sum((total % _LANE) << (32 * lane) for lane, total in enumerate(totals))


def total(terms: Iterable[tuple[int, int]]) -> int:
    """Return the fold of several tensors together; a term is (how often, fold)."""
    sums = [0] * len(_MIXES)
    for count, value in terms:
        for lane in range(len(_MIXES)):
            sums[lane] += count * (value >> (32 * lane) & (_LANE - 1))
    return sum((value % _LANE) << (32 * lane) for lane, value in enumerate(sums))


def written(tensor: torch.Tensor) -> str:
    """Return a tensor's checksum as a server says it: "polyturn1 bfloat16 00f3…"."""
    return f"{PREFIX} {str(tensor.dtype).removeprefix('torch.')} {fold(tensor):016x}"


def checksums(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return name -> checksum of each floating-point tensor that is there."""
    return {name: written(tensor) for name, tensor in named if tensor.is_floating_point() and tensor.numel()}
