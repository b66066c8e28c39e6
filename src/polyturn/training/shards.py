"""Shards: tensors with a part on each rank, and their checkpoints by `torch.distributed.checkpoint`.

    write_shards     every rank writes its part from a copy, during training     ->  policy/.metadata, __0_0.distcp, …
    read_shards      every rank reads its part into its tensors                  <-  written by any number of ranks

Parts are described by their position in the whole tensor, so the number of ranks may change between writing and reading. A
single process is a group of one.
"""

from __future__ import annotations

import functools
import math
import socket
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from polyturn.core.errors import CheckpointError, one_line
from polyturn.engines.weights.stream import StreamedTensors, TensorKind
from polyturn.training import shard_reader
from polyturn.training.shard_reader import METADATA, ShardReader

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable", category=UserWarning)

_T = TypeVar("_T")
Origin = tuple[int, ...]
"""Origin of a part in the whole tensor, an index per dimension."""


def write_shards(state: dict[str, Any], folder: Path) -> Future[Any]:
    """Start writing this process's part of a flat state (tensors and numbers) from a copy; every rank must call it."""
    staged = {name: _at_its_start(value) if isinstance(value, DTensor) else value for name, value in state.items()}
    return dcp.async_save(  # type: ignore[return-value]  # it returns a future if no stager is given
        staged, checkpoint_id=folder, process_group=_group(folder), no_dist=not dist.is_initialized()
    )


def _at_its_start(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if it does not start at the start of its storage: torch cannot write such a tensor."""
    return tensor.detach().clone() if tensor.storage_offset() else tensor


def is_written(writing: Future[Any], *, whose: str) -> bool:
    """Return whether `writing`, from `write_shards`, is finished on all ranks.

    Raises:
        CheckpointError: it could not be written.
    """
    if writing.done() and (problem := writing.exception()) is not None:
        raise CheckpointError(f"the {whose} cannot be written: {_reason(problem)}") from problem
    return writing.done()


def read_shards(state: dict[str, Any], folder: Path, *, whose: str = "checkpoint", is_alone: bool = False) -> None:
    """Read this process's part of a flat state into its tensors. Every rank must call it, unless `is_alone` is set, which
    reads without the other ranks.

    Raises:
        CheckpointError: the folder is damaged or incomplete.
    """
    group = None if is_alone else _group(folder)
    try:
        shard_reader.load(state, folder, group=group)
    except (CheckpointException, Exception) as problem:  # damaged bytes may raise anything, on any rank
        raise _unreadable(problem, folder, whose) from problem


def stored_tensors(folder: Path, *, prefix: str) -> StreamedTensors:
    """Stream whole tensors from a folder of shards: those whose names start with `prefix`, without the prefix."""
    kinds = inside(stored_kinds(folder), prefix)

    # `is_alone`, because each rank exports other tensors, and a collective call would wait for ranks that do not join it.
    def read(names: Sequence[str]) -> dict[str, Tensor]:
        state = {prefix + name: torch.empty(kinds[name].shape, dtype=kinds[name].dtype) for name in names}
        read_shards(state, folder, is_alone=True)
        return inside(state, prefix)

    return StreamedTensors(kinds, read)


def stored_kinds(folder: Path, *, whose: str = "checkpoint") -> dict[str, TensorKind]:
    """Return name -> shape and dtype of the tensors in a folder of shards.

    Raises:
        CheckpointError: this node does not see the folder, or the folder has no shards or is damaged.
    """
    if not folder.parent.is_dir():  # the controller, on another node, has found the checkpoint
        raise CheckpointError(
            f"the node {socket.gethostname()!r} does not see the folder {folder.parent}; set `out` to a folder that all "
            "nodes share, and move the run there"
        )
    # Shards without metadata are damaged, which reading reports below; a folder without either has another format.
    if not (folder / METADATA).is_file() and not any(folder.glob("*.distcp")):
        raise CheckpointError(
            f"there is no state in shards in {folder}; a checkpoint of an earlier version holds whole tensors and cannot be "
            f"resumed, but a new run can start from its weights (model.path={folder.parent / 'model'})"
        )
    try:
        metadata = ShardReader(folder).read_metadata().state_dict_metadata
    except Exception as problem:  # unpickling damaged bytes may raise anything
        raise _unreadable(problem, folder, whose) from problem
    return {
        name: TensorKind(tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def absent_file(folder: Path) -> str | None:
    """Return the name of a file of a written folder of shards that this machine does not see; None if it sees all."""
    if not (folder / METADATA).is_file():
        return METADATA
    names = {part.relative_path for part in ShardReader(folder).read_metadata().storage_data.values()}
    return next((name for name in sorted(names) if not (folder / name).is_file()), None)


class Names:
    """Maps a network's tensors to their names and shapes in checkpoints and engines. In this base class the network has the
    same names and shapes, and a tensor that is split over ranks is a `DTensor`.

    The methods take parameters, or their moments or float32 masters, which are split alike, under the parameters' names. A
    value may also be one number per parameter, which every rank has.
    """

    def kinds(self, tensors: Mapping[str, Tensor]) -> dict[str, TensorKind]:
        """Return name -> shape and dtype of the whole tensor."""
        return {name: TensorKind(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    def sources(self, name: str) -> tuple[str, ...]:
        """Return the names under which a tensor of the network is written."""
        return (name,)

    def whole(self, tensors: Mapping[str, Tensor], name: str) -> Tensor | None:
        """Return a whole tensor, at least on the first rank; the call is collective."""
        return whole_tensor(tensors[name])

    def shards(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this process's live parts, as checkpoints write and read them."""
        return dict(tensors)

    def read(self, sections: Mapping[str, Mapping[str, Tensor]], folder: Path, *, whose: str) -> None:
        """Fill live tensors, prefix -> name -> tensor, from a folder; the call is collective.

        Raises:
            CheckpointError: the folder is damaged.
        """
        read_shards(flat({prefix: self.shards(tensors) for prefix, tensors in sections.items()}), folder, whose=whose)

    def take(self, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Copy this process's parts of whole `weights` into live tensors."""
        for name in tensors.keys() & weights.keys():
            tensors[name].copy_(cut_like(weights[name], tensors[name]))

    def parts(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[Origin, Tensor]]:
        """Return name -> origin in the whole tensor -> this process's live part at that origin; replicas have the same
        origin."""
        return {name: {start_of(tensor): local_part(tensor)} for name, tensor in tensors.items()}


def flat(sections: Mapping[str, Mapping[str, _T]]) -> dict[str, _T]:
    """Join the sections: prefix/name -> value."""
    return {prefix + name: value for prefix, section in sections.items() for name, value in section.items()}


class Boxes(Tensor):
    """The live boxes of a tensor that this process has, in the form that `torch.distributed.checkpoint` reads."""

    boxes: dict[Origin, Tensor]
    """Origin of a box in the whole tensor -> its values."""

    def __new__(cls, kind: TensorKind, boxes: Mapping[Origin, Tensor]) -> Boxes:
        """Wrap the boxes of a tensor of that `kind`."""
        tensor = Tensor._make_wrapper_subclass(cls, kind.shape, dtype=kind.dtype)
        tensor.boxes = dict(boxes)
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Support only the copy that `torch.distributed.checkpoint` makes to stage the boxes."""
        if func is torch.ops.aten.new_empty.default:
            return cls(TensorKind(tuple(args[0].shape), args[0].dtype), {})
        raise NotImplementedError(f"{func} of boxes of a tensor")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(origin), box.shape) for origin, box in self.boxes.items()]

    def __create_write_items__(self, name: str, of: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.boxes[tuple(index.offset or ())]


def start_of(tensor: Tensor) -> Origin:
    """Return the origin of this rank's part in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    return tuple(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])


def _unreadable(problem: BaseException, folder: Path, whose: str) -> CheckpointError:
    return CheckpointError(
        f"the {whose} in {folder} cannot be read ({_reason(problem)}); to resume from an earlier one, remove {folder.parent}"
    )


def _reason(problem: BaseException) -> str:
    """Return the error of the first rank that has one."""
    if isinstance(problem, CheckpointException):
        problem = next(iter(problem.failures.values()))[0]
    return one_line(problem)


def _group(folder: Path) -> Any:
    """Return the process group for the checkpoint of a folder; None for one process.

    Training and every folder have groups of their own: a policy and its critic are written at the same time by two threads,
    and in one group their collectives would run in a different order on each rank.
    """
    return _new_group(dist.group.WORLD, folder.name) if dist.is_initialized() else None


@functools.cache
def _new_group(world: Any, name: str) -> Any:
    return dist.new_group(backend="gloo")


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor`, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def box_of(tensor: Tensor, origin: Origin, shape: Sequence[int]) -> Tensor:
    """Return a view of a box that is entirely on this rank."""
    starts = zip(origin, start_of(tensor), shape, strict=True)
    return local_part(tensor)[tuple(slice(at - start, at - start + size) for at, start, size in starts)]


def num_parts(tensor: Tensor) -> int:
    """Return the number of distinct parts into which a tensor is cut."""
    assert isinstance(tensor, DTensor)
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of `tensor`. If ranks have parts, gather them; the call is then collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def cut_like(whole: Tensor, like: Tensor | None) -> Tensor:
    """Return this rank's part of `whole`, cut like `like`."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole
    # Without `distribute_tensor`, which would scatter from rank 0, although each rank already has the whole tensor.
    shape, start = compute_local_shape_and_global_offset(whole.shape, like.device_mesh, like.placements)
    part = whole[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
    part = part.to(device=part.device if like.is_meta else like.to_local().device).contiguous()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def inside(tensors: Mapping[str, _T], prefix: str) -> dict[str, _T]:
    """Return the entries whose names start with `prefix`, without the prefix."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def require_same_shapes(
    stored: Mapping[str, TensorKind], own: Mapping[str, TensorKind], *, whose: str = "checkpoint", hint: str = ""
) -> None:
    """Raise, before loading, if tensors are of another model; `whose` names their source in messages.

    Raises:
        CheckpointError: a name or a shape differs.
    """
    if stored.keys() != own.keys():
        strange, absent = sorted(stored.keys() - own.keys()), sorted(own.keys() - stored.keys())
        raise CheckpointError(
            f"the {whose} is of another model: it lacks {absent[:3] or 'no tensor'} and has {strange[:3] or 'no tensor'} "
            f"in addition{hint}"
        )
    for name, kind in stored.items():
        if kind.shape != own[name].shape:
            raise CheckpointError(
                f"the {whose} is of another model: its {name} has the shape {kind.shape} and this model's "
                f"{own[name].shape}{hint}"
            )
