"""Shards: tensors of which each rank holds a part, written and read by `torch.distributed.checkpoint`, and cut as a
parameter is.

    save     every rank writes its own part from a copy, beside training     ->  policy/.metadata, __0_0.distcp, __1_0.distcp
    load     every rank reads its own part, into the tensors that it has     <-  of as many ranks as there were then

No rank holds a tensor of another one, so the number of ranks may change between the two; one process is a group of one.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from polyturn.core.errors import CheckpointError, one_line
from polyturn.engines.weight_transport import StreamedTensors, TensorKind

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
METADATA = ".metadata"
"""The file that is written last; a folder with it is whole."""


class StoredInShards:
    """What saves and loads the state of a backend. A class under it says what the state is (`Backend.state_dict`)."""

    whose = "checkpoint"
    """What sentences call a state of it."""
    _saving: Future[Any] | None = None

    def state_dict(self, wanted: Container[str] | None = None) -> dict[str, Any]:
        """Return name -> live tensor, or number, of this process."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state of which the tensors have been read already."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Begin to write this process's part of the state into `folder`, from a copy; every rank must call it."""
        self._saving = dcp.async_save(  # type: ignore[assignment]  # a future, where nothing else is staged
            self.state_dict(), checkpoint_id=folder, process_group=_group(), no_dist=not dist.is_initialized()
        )

    def is_saved(self) -> bool:
        """Return whether what `save` began is written, here and on all ranks.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._saving is None or not self._saving.done():
            return self._saving is None
        problem, self._saving = self._saving.exception(), None
        if problem is not None:
            raise CheckpointError(f"the {self.whose} cannot be written: {_reason(problem)}") from problem
        return True

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote, here or on another number of ranks; every rank must call it.

        Raises:
            CheckpointError: there is none, it is damaged, or it is of another model.
        """
        found = stored_shapes(folder, whose=self.whose)
        state = self.state_dict(found)
        self.check_state(found, {name: value.shape for name, value in state.items() if isinstance(value, Tensor)})
        _read(state, folder, whose=self.whose, group=_group())
        self.load_state_dict(state)

    def check_state(self, found: Mapping[str, torch.Size | None], own: Mapping[str, torch.Size]) -> None:
        """Refuse a state that is not this one's, by the names and shapes of its tensors.

        Raises:
            CheckpointError: with what differs.
        """
        require_same_shapes({name: shape for name, shape in found.items() if shape is not None}, own, whose=self.whose)


def stored_tensors(folder: Path, *, prefix: str) -> StreamedTensors:
    """Return the whole tensors in a folder that `StoredInShards.save` wrote, as a stream: those whose names begin with
    `prefix`, named without it."""
    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    kinds = {
        name.removeprefix(prefix): TensorKind(tuple(entry.size), entry.properties.dtype)
        for name, entry in found.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(prefix)
    }

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        state = {prefix + name: torch.empty(kinds[name].shape, dtype=kinds[name].dtype) for name in names}
        _read(state, folder, whose="checkpoint", group=None)
        return inside(state, prefix)

    return StreamedTensors(kinds, read)


def stored_shapes(folder: Path, *, whose: str = "checkpoint") -> dict[str, torch.Size | None]:
    """Return what lies in a folder that `StoredInShards.save` wrote: name -> shape of a tensor, None of a number.

    Raises:
        CheckpointError: there is nothing, or it is damaged.
    """
    if not (folder / METADATA).is_file():
        raise CheckpointError(
            f"there is no state in shards in {folder}; a checkpoint of an earlier version holds whole tensors and cannot be "
            f"resumed, but a new run can start from its weights (model.path={folder.parent / 'model'})"
        )
    try:
        found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as problem:  # whatever unpickling damaged bytes comes to
        raise CheckpointError(
            f"the {whose} in {folder} is damaged ({one_line(problem)}); resume from an earlier one"
        ) from problem
    return {name: entry.size if isinstance(entry, TensorStorageMetadata) else None for name, entry in found.items()}


def _read(state: dict[str, Any], folder: Path, *, whose: str, group: Any) -> None:
    try:
        dcp.load(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
    except (CheckpointException, Exception) as problem:  # whatever damaged bytes come to, on whichever rank
        said = f"the {whose} in {folder} cannot be read ({_reason(problem)}); resume from an earlier one"
        raise CheckpointError(said) from problem


def _reason(problem: BaseException) -> str:
    """Return what went wrong, of the first rank where something did."""
    if isinstance(problem, CheckpointException):
        problem = next(iter(problem.failures.values()))[0]
    return one_line(problem)


def _group() -> Any:
    """Return the group in which ranks agree about files, apart from what training says meanwhile; None for one process."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable", category=UserWarning)
    return _new_group(dist.group.WORLD) if dist.is_initialized() else None


@functools.cache
def _new_group(world: Any) -> Any:
    return dist.new_group(backend="gloo")


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of `tensor`, the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_split_over_row(tensor: Tensor) -> bool:
    """Return whether the ranks of a tensor-parallel row hold different parts of `tensor`."""
    if not isinstance(tensor, DTensor):
        return False
    names = tensor.device_mesh.mesh_dim_names or ()
    return "tp" in names and tensor.placements[names.index("tp")].is_shard()


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of `tensor`, gathered where ranks hold parts; then the call is collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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


def inside(tensors: Mapping[str, _T], prefix: str) -> dict[str, _T]:
    """Return the tensors, or what is said of them, whose names begin with `prefix`, named without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def require_same_shapes(
    found: Mapping[str, torch.Size], own: Mapping[str, torch.Size], *, whose: str = "checkpoint", hint: str = ""
) -> None:
    """Refuse the tensors of another model before they are loaded; `whose` says where they are from.

    Raises:
        CheckpointError: a name or a shape differs.
    """
    if found.keys() != own.keys():
        strange, absent = sorted(found.keys() - own.keys()), sorted(own.keys() - found.keys())
        raise CheckpointError(
            f"the {whose} is of another model: it lacks {absent[:3] or 'nothing'} and has {strange[:3] or 'nothing'} more"
            f"{hint}"
        )
    for name, shape in found.items():
        if shape != own[name]:
            raise CheckpointError(
                f"the {whose} is of another model: its {name} has the shape {tuple(shape)} and this model's "
                f"{tuple(own[name])}{hint}"
            )
