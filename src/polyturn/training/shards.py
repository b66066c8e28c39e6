"""Whole tensors and their shards: nested states gathered on rank 0, spread from rank 0, and cut as a parameter is.

    shards on every rank  -- gather -->  whole on rank 0, None elsewhere  -- spread, cut -->  shards on every rank

The middle is what a single process would write, so a checkpoint does not know how many ranks made it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from polyturn.core.errors import CheckpointError


class _TensorPlace(NamedTuple):
    """Where a tensor stood."""

    number: int
    shape: torch.Size
    dtype: torch.dtype


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of `tensor`, the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_split_over_row(tensor: Tensor) -> bool:
    """Return whether the ranks of a tensor-parallel row hold different parts of `tensor`."""
    if not isinstance(tensor, DTensor):
        return False
    names = tensor.device_mesh.mesh_dim_names or ()
    return "tp" in names and tensor.placements[names.index("tp")].is_shard()


def gather_whole(value: Any) -> Any:
    """Return nested dicts and lists with whole tensors on the CPU on rank 0, and None for each tensor elsewhere."""
    if isinstance(value, Tensor):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole.detach().to("cpu", copy=True) if dist.get_rank() == 0 else None
    if isinstance(value, Mapping):
        return {k: gather_whole(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(gather_whole(v) for v in value)
    return value


def spread_whole(value: Any) -> Any:
    """Return rank 0's nested dicts and lists, with their tensors, on every rank."""
    tensors: list[Tensor] = []

    def take(part: Any) -> Any:
        if isinstance(part, Tensor):
            tensors.append(part.detach().cpu().contiguous())
            return _TensorPlace(len(tensors) - 1, part.shape, part.dtype)
        if isinstance(part, Mapping):
            return {k: take(v) for k, v in part.items()}
        return type(part)(take(v) for v in part) if isinstance(part, list | tuple) else part

    def put(part: Any) -> Any:
        if isinstance(part, _TensorPlace):
            tensor = tensors[part.number] if dist.get_rank() == 0 else torch.empty(part.shape, dtype=part.dtype)
            dist.broadcast(tensor, src=0)
            return tensor
        if isinstance(part, Mapping):
            return {k: put(v) for k, v in part.items()}
        return type(part)(put(v) for v in part) if isinstance(part, list) or type(part) is tuple else part

    outline = [take(value)]
    dist.broadcast_object_list(outline, src=0)
    return put(outline[0])


def cut_like(whole: Tensor, like: Tensor | None) -> Tensor:
    """Return this rank's part of `whole`, cut as `like` is."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole
    shape, start = compute_local_shape_and_global_offset(whole.shape, like.device_mesh, like.placements)
    part = whole[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
    part = part.to(device=part.device if like.is_meta else like.to_local().device).contiguous()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def cut_optimizer(state: Mapping[str, Any], like: Mapping[str, Tensor], params: Sequence[Tensor]) -> dict[str, Any]:
    """Return this rank's part of the whole state of an optimizer.

    Args:
        state: From `Optimizer.state_dict`, whole.
        like: Name -> the model's own tensor.
        params: The parameters by the numbers that the state gives them.
    """

    def moments(number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        own = params[number] if number < len(params) else None
        return {name: cut_like(v, own) if isinstance(v, Tensor) else v for name, v in values.items()}

    adamw = {**state["adamw"], "state": {number: moments(number, v) for number, v in state["adamw"]["state"].items()}}
    masters = {name: cut_like(tensor, like.get(name)) for name, tensor in state.get("masters", {}).items()}
    return {**state, "adamw": adamw, "masters": masters}


def inside(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, named without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def require_same_shapes(found: Mapping[str, Tensor], own: Mapping[str, Tensor], *, whose: str = "checkpoint") -> None:
    """Refuse the tensors of another model before they are loaded; `whose` says where they are from.

    Raises:
        CheckpointError: a name or a shape differs.
    """
    if found.keys() != own.keys():
        strange, absent = sorted(found.keys() - own.keys()), sorted(own.keys() - found.keys())
        raise CheckpointError(
            f"the {whose} is of another model: it lacks {absent[:3] or 'nothing'} and has {strange[:3] or 'nothing'} more"
        )
    for name, tensor in found.items():
        if tensor.shape != own[name].shape:
            raise CheckpointError(
                f"the {whose} is of another model: its {name} has the shape {tuple(tensor.shape)} and this model's "
                f"{tuple(own[name].shape)}"
            )
