"""Additive checksums of tensors, for both ends of a weight sync.

    fold([0.5, -1.0, 0.0])  =  mix(0x3f000000) + mix(0xbf800000) + 0      modulo 2**32, with two different mixes

A fold does not depend on order and is additive: the fold of a fused matrix is the sum of the folds of its parts, the fold of
a sharded matrix is the sum over its shards, and padding with zeros adds 0. So a server's fused and sharded tensors can be
compared with the trainer's without knowing their layout.

The mixes are bijective, so a single differing element always changes the fold. They use only multiplications, which
processors vectorise; shifts and wider integers take ten times as long.

The trainer imports this file as part of polyturn, and servers find it on their PYTHONPATH, so it may import only torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

PREFIX = "polyturn1"
"""Prefix of these checksums; it changes with the algorithm."""
_LANE = 2**32
_PIECES = {"cpu": 2**15}
"""Number of elements at a time; on a CPU as many as fit into its cache."""
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
    """Return the sums of two mixes of each element's bits, each modulo 2**32; zeros add 0."""
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
    """Return the fold of several tensors together; a term is (count, fold)."""
    sums = [0] * len(_MIXES)
    for count, value in terms:
        for lane in range(len(_MIXES)):
            sums[lane] += count * (value >> (32 * lane) & (_LANE - 1))
    return sum((value % _LANE) << (32 * lane) for lane, value in enumerate(sums))


def written(tensor: torch.Tensor) -> str:
    """Return a tensor's checksum as text: "polyturn1 bfloat16 00f3…"."""
    return f"{PREFIX} {str(tensor.dtype).removeprefix('torch.')} {fold(tensor):016x}"


def checksums(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return name -> checksum of each floating-point tensor."""
    return {name: written(tensor) for name, tensor in named if tensor.is_floating_point() and tensor.numel()}
