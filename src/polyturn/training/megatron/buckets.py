"""Sum gradients over ranks, and gather rows of weights from them, with one collective call for many tensors.

    tensors  a [3, 2], b [4]     of two ranks, of which each keeps the rows of its index
    bucket   [2, 6]              rank 0   a00 a01 a10 a11 b0 b1
                                 rank 1   a20 a21  .   .  b2 b3        padded, so that ranks have the same number of rows

A call per tensor would wait for the network once per tensor. A bucket is a copy, so its size is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

BUCKET = 2**26
"""Largest number of elements of a bucket with several tensors: 256 MiB in float32."""


def in_buckets(sizes: Iterable[tuple[str, Hashable, int]], *, limit: int = BUCKET) -> list[list[str]]:
    """Return the names of the tensors of each bucket, from (name, kind, number of elements); a bucket has one kind."""
    buckets: list[list[str]] = []
    last: dict[Hashable, tuple[list[str], int]] = {}
    for name, kind, size in sizes:
        names, total = last.get(kind, ([], limit))
        if total + size > limit:
            names, total = [], 0
            buckets.append(names)
        names.append(name)
        last[kind] = names, total + size
    return buckets


def sum_to_rows(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Return this rank's rows of the sum of each tensor over the ranks of `group`; collective."""
    count = group.size()
    if count == 1:
        return list(tensors)
    bucket = torch.cat([_stacked(tensor, _num_rows(tensor, count), count) for tensor in tensors], dim=1)
    own = bucket.new_empty(bucket.shape[1])
    dist.reduce_scatter_tensor(own, bucket.flatten(), group=group)
    parts = zip(tensors, own.split([_width(tensor, count) for tensor in tensors]), strict=True)
    return [part.view(-1, *tensor.shape[1:])[: len(own_rows(tensor, group))] for tensor, part in parts]


def gather_rows(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Fill each tensor, in which each rank has its own rows, with the rows of all ranks of `group`; collective."""
    count = group.size()
    if count == 1:
        return
    own = torch.cat([_stacked(own_rows(tensor, group), _num_rows(tensor, count), 1)[0] for tensor in tensors])
    bucket = own.new_empty(count * len(own))
    dist.all_gather_into_tensor(bucket, own, group=group)
    parts = bucket.view(count, -1).split([_width(tensor, count) for tensor in tensors], dim=1)
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.reshape(-1, *tensor.shape[1:])[: len(tensor)])


def sum_together(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace each of a few small tensors by its sum over the ranks of `group`; collective."""
    if not tensors or group.size() == 1:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def own_rows(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's rows of a tensor, live. As with `Tensor.chunk`, the last ranks may have fewer, or none."""
    size = _num_rows(tensor, group.size())
    return tensor[group.rank() * size : (group.rank() + 1) * size]


def _num_rows(tensor: Tensor, count: int) -> int:
    return -(-len(tensor) // count)


def _width(tensor: Tensor, count: int) -> int:
    """Return the number of elements of a tensor's rows on one rank, with padding."""
    return _num_rows(tensor, count) * math.prod(tensor.shape[1:])


def _stacked(rows: Tensor, size: int, count: int) -> Tensor:
    """Return rows, padded with 0 to `count` times `size` rows, as [count, elements]."""
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    return pad(flat, (0, 0, 0, count * size - len(rows))).view(count, -1)
