"""Shards: tensors of which each rank holds a part, written and read by `torch.distributed.checkpoint`, and cut as a
parameter is.

    write_shards     every rank writes its own part from a copy, beside training     ->  policy/.metadata, __0_0.distcp, …
    read_shards      every rank reads its own part, into the tensors that it has     <-  of as many ranks as there were then

No rank holds a tensor of another one, so the number of ranks may change between the two; one process is a group of one.
"""

from __future__ import annotations

import functools
import math
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
from polyturn.engines.weight_transport import StreamedTensors, TensorKind
from polyturn.training import shard_reader
from polyturn.training.shard_reader import METADATA, ShardReader

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable", category=UserWarning)

_T = TypeVar("_T")
Place = tuple[int, ...]
"""The beginning of a part of a tensor in the whole, along each of its dimensions."""


def write_shards(state: dict[str, Any], folder: Path) -> Future[Any]:
    """Begin to write this process's part of a flat state, tensors and numbers, from a copy; every rank must call it."""
    staged = {name: _at_its_start(value) if isinstance(value, DTensor) else value for name, value in state.items()}
    return dcp.async_save(  # type: ignore[return-value]  # a future, where nothing else is staged
        staged, checkpoint_id=folder, process_group=_group(folder), no_dist=not dist.is_initialized()
    )


def _at_its_start(tensor: Tensor) -> Tensor:
    """Return a tensor that begins where its storage does, a copy of one that does not: torch would look for the bytes of the
    whole behind it, and there are none."""
    return tensor.detach().clone() if tensor.storage_offset() else tensor


def is_written(writing: Future[Any], *, whose: str) -> bool:
    """Return whether what `write_shards` began is written, here and on all ranks.

    Raises:
        CheckpointError: it could not be written.
    """
    if writing.done() and (problem := writing.exception()) is not None:
        raise CheckpointError(f"the {whose} cannot be written: {_reason(problem)}") from problem
    return writing.done()


def read_shards(state: dict[str, Any], folder: Path, *, whose: str = "checkpoint", is_alone: bool = False) -> None:
    """Read what this process has of a flat state, tensors in place; every rank must call it, where none `is_alone`.

    Raises:
        CheckpointError: it is damaged, or lacks some of it.
    """
    group = None if is_alone else _group(folder)
    try:
        shard_reader.load(state, folder, group=group)
    except (CheckpointException, Exception) as problem:  # whatever damaged bytes come to, on whichever rank
        raise _unreadable(problem, folder, whose) from problem


def stored_tensors(folder: Path, *, prefix: str) -> StreamedTensors:
    """Return the whole tensors in a folder that ranks wrote, as a stream: those whose names begin with `prefix`, named
    without it."""
    kinds = inside(stored_kinds(folder), prefix)

    # Alone: an export is one process's work, and ranks read different tensors, so that no call has a counterpart.
    def read(names: Sequence[str]) -> dict[str, Tensor]:
        state = {prefix + name: torch.empty(kinds[name].shape, dtype=kinds[name].dtype) for name in names}
        read_shards(state, folder, is_alone=True)
        return inside(state, prefix)

    return StreamedTensors(kinds, read)


def stored_kinds(folder: Path, *, whose: str = "checkpoint") -> dict[str, TensorKind]:
    """The shapes and dtypes of the tensors in a folder that ranks wrote.

    Raises:
        CheckpointError: there is nothing, or it is damaged.
    """
    # Shards without metadata are a damaged state, as reading them tells; a folder without either is of another format.
    if not (folder / METADATA).is_file() and not any(folder.glob("*.distcp")):
        raise CheckpointError(
            f"there is no state in shards in {folder}; a checkpoint of an earlier version holds whole tensors and cannot be "
            f"resumed, but a new run can start from its weights (model.path={folder.parent / 'model'})"
        )
    try:
        metadata = ShardReader(folder).read_metadata().state_dict_metadata
    except Exception as problem:  # whatever unpickling damaged bytes comes to
        raise _unreadable(problem, folder, whose) from problem
    return {
        name: TensorKind(tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


class Names:
    """The names and shapes that a network's tensors have for checkpoints and engines, and what of them this process holds:
    its own names, and a `DTensor` where ranks hold parts.

    What is true of parameters is true of their moments and float32 copies, so all methods take any of these, by the names of
    the network: one tensor for each parameter, or one number for each, which is whole everywhere.
    """

    def kinds(self, tensors: Mapping[str, Tensor]) -> dict[str, TensorKind]:
        """Return name -> shape and dtype of the whole."""
        return {name: TensorKind(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    def sources(self, name: str) -> tuple[str, ...]:
        """Return by which names a tensor of the network is written."""
        return (name,)

    def whole(self, tensors: Mapping[str, Tensor], name: str) -> Tensor | None:
        """Return a whole tensor, at least on the first rank; the call is collective."""
        return whole_tensor(tensors[name])

    def shards(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this process's parts of them, live, as a checkpoint writes and reads them."""
        return dict(tensors)

    def read(self, sections: Mapping[str, Mapping[str, Tensor]], folder: Path, *, whose: str) -> None:
        """Fill live tensors, prefix -> name -> tensor, from a folder; the call is collective.

        Raises:
            CheckpointError: it is damaged.
        """
        read_shards(flat({prefix: self.shards(tensors) for prefix, tensors in sections.items()}), folder, whose=whose)

    def take(self, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Write this process's parts of whole `weights` into live tensors."""
        for name in tensors.keys() & weights.keys():
            tensors[name].copy_(cut_like(weights[name], tensors[name]))

    def parts(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[Place, Tensor]]:
        """Return name -> place in the whole -> what this process holds there, live; replicas have one place."""
        return {name: {start_of(tensor): local_part(tensor)} for name, tensor in tensors.items()}


def flat(sections: Mapping[str, Mapping[str, _T]]) -> dict[str, _T]:
    """Return prefix + name -> what is there."""
    return {prefix + name: value for prefix, section in sections.items() for name, value in section.items()}


class Boxes(Tensor):
    """A tensor of which this process has some boxes, live, as `torch.distributed.checkpoint` writes and reads them."""

    boxes: dict[Place, Tensor]
    """The beginning of a box in the whole -> its values."""

    def __new__(cls, kind: TensorKind, boxes: Mapping[Place, Tensor]) -> Boxes:
        """Say what is here of a tensor of that `kind`."""
        tensor = Tensor._make_wrapper_subclass(cls, kind.shape, dtype=kind.dtype)
        tensor.boxes = dict(boxes)
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Make the copy that is staged, into which `torch.distributed.checkpoint` puts copies of the boxes."""
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


def start_of(tensor: Tensor) -> Place:
    """Return the index in the whole at which this rank's part begins."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    return tuple(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])


def _unreadable(problem: BaseException, folder: Path, whose: str) -> CheckpointError:
    return CheckpointError(
        f"the {whose} in {folder} cannot be read ({_reason(problem)}); to resume from an earlier one, remove {folder.parent}"
    )


def _reason(problem: BaseException) -> str:
    """The first rank's error."""
    if isinstance(problem, CheckpointException):
        problem = next(iter(problem.failures.values()))[0]
    return one_line(problem)


def _group(folder: Path) -> Any:
    """Return the group in which ranks agree about the files of a folder; None for one process.

    It is apart from what training says meanwhile, and from folders of other names: a policy and its critic are written at
    the same time, by a thread each, and in one group their words would meet in another order on each rank.
    """
    return _new_group(dist.group.WORLD, folder.name) if dist.is_initialized() else None


@functools.cache
def _new_group(world: Any, name: str) -> Any:
    return dist.new_group(backend="gloo")


def local_part(tensor: Tensor) -> Tensor:
    """The part of `tensor` that this rank holds, the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def box_of(tensor: Tensor, origin: Place, shape: Sequence[int]) -> Tensor:
    """Return a box of a tensor, all of which this rank holds, as a view."""
    starts = zip(origin, start_of(tensor), shape, strict=True)
    return local_part(tensor)[tuple(slice(at - start, at - start + size) for at, start, size in starts)]


def num_parts(tensor: Tensor) -> int:
    """Return the number of parts of a tensor that ranks hold, where each has one; more ranks hold the same ones."""
    assert isinstance(tensor, DTensor)
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of `tensor`, gathered where ranks hold parts; then the call is collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def cut_like(whole: Tensor, like: Tensor | None) -> Tensor:
    """Return this rank's part of `whole`, cut as `like` is."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole
    # By hand, not by `distribute_tensor`: that would scatter from rank 0, and here each rank has the whole already.
    shape, start = compute_local_shape_and_global_offset(whole.shape, like.device_mesh, like.placements)
    part = whole[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
    part = part.to(device=part.device if like.is_meta else like.to_local().device).contiguous()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def inside(tensors: Mapping[str, _T], prefix: str) -> dict[str, _T]:
    """Return the tensors, or what is said of them, whose names begin with `prefix`, named without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def require_same_shapes(
    stored: Mapping[str, TensorKind], own: Mapping[str, TensorKind], *, whose: str = "checkpoint", hint: str = ""
) -> None:
    """Refuse the tensors of another model before they are loaded; `whose` says where they are from.

    Raises:
        CheckpointError: a name or a shape differs.
    """
    if stored.keys() != own.keys():
        strange, absent = sorted(stored.keys() - own.keys()), sorted(own.keys() - stored.keys())
        raise CheckpointError(
            f"the {whose} is of another model: it lacks {absent[:3] or 'nothing'} and has {strange[:3] or 'nothing'} more"
            f"{hint}"
        )
    for name, kind in stored.items():
        if kind.shape != own[name].shape:
            raise CheckpointError(
                f"the {whose} is of another model: its {name} has the shape {kind.shape} and this model's "
                f"{own[name].shape}{hint}"
            )
