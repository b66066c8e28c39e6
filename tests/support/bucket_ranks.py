"""Gradients summed on ranks in buckets, and by one call per tensor, as `DTensor` does it."""

import collections
import contextlib
import functools
import json

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from polyturn.training.megatron.buckets import gather_rows, own_rows, sum_to_rows, sum_together

SHAPES = ((4, 3), (5,), (1, 2), (7, 2, 2), (2,), (3, 5))
"""Numbers of rows that divide among two ranks, do not, or are fewer."""
CALLS = ("reduce_scatter_tensor", "all_gather_into_tensor", "all_reduce")


@contextlib.contextmanager
def counted_calls():
    """Count the calls of each of `CALLS`."""
    calls, originals = collections.Counter(), {name: getattr(dist, name) for name in CALLS}

    def counting(name, *args, **options):
        calls[name] += 1
        return originals[name](*args, **options)

    for name in CALLS:
        setattr(dist, name, functools.partial(counting, name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def largest_difference(some, others):
    assert [one.shape for one in some] == [other.shape for other in others]
    return max(float((one - other).abs().max()) for one, other in zip(some, others, strict=True) if one.numel())


def measure(out):
    """Write how far the two differ, and how often the ranks communicate."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    group = mesh.get_group()
    generator = torch.Generator().manual_seed(dist.get_rank())
    grads = [torch.randn(*shape, generator=generator) for shape in SHAPES]
    before = [
        DTensor.from_local(grad, mesh, [Partial()], run_check=False).redistribute(mesh, [Shard(0)]).to_local()
        for grad in grads
    ]
    weights = [torch.zeros_like(grad) for grad in grads]
    sums = [grad.clone() for grad in grads]
    with counted_calls() as calls:
        rows = sum_to_rows(grads, group)
        for weight, row in zip(weights, rows, strict=True):
            own_rows(weight, group).copy_(row)
        gather_rows(weights, group)
        sum_together(sums, group)
    differences = {"rows": largest_difference(rows, before), "whole": largest_difference(weights, sums)}
    measured = [None] * dist.get_world_size()
    dist.all_gather_object(measured, differences | {"calls": dict(calls)})
    if dist.get_rank() == 0:
        out.write_text(json.dumps(measured))
