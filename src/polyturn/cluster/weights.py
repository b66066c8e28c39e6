"""Weights and models on their way through the cluster, in Ray's object store, which brings an object to each node once.

rank 0              store(buckets)                  the controller and the servers' actors get references, no tensors
a server's node     ServerActor.hold                one of the node's servers writes the checkpoint that all of them read
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import ray
from torch import Tensor

from polyturn.engines.base import ModelFolder
from polyturn.engines.weight_files import WrittenWeights
from polyturn.engines.weight_transport import StreamedTensors, buckets, first_names
from polyturn.infra.array_socket import tensor_as_array, tensor_over

if TYPE_CHECKING:
    from polyturn.engines.launcher import RunningServer


class StoredWeights(Mapping[str, Any]):
    """Weights in the object store: name -> tensor, over the store's memory on whichever node reads them."""

    def __init__(self, refs: tuple[Any, ...], tied: Mapping[str, str]) -> None:
        self.refs = refs
        self._tied = tied
        """Name -> under which name the same tensor is stored."""

    @classmethod
    def put(cls, weights: Mapping[str, Tensor]) -> StoredWeights:
        """Put weights there, a tied tensor once; those of ranks by rank 0 itself."""
        if isinstance(weights, StreamedTensors):
            return cls(weights.over(store), {})
        tied = {name: of for name, of in first_names(weights).items() if name != of}
        return cls(store(buckets({name: t.detach() for name, t in weights.items() if name not in tied})), tied)

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        tensors = {name: tensor_over(*stored) for piece in ray.get(list(self.refs)) for name, stored in piece.items()}
        return tensors | {name: tensors[of] for name, of in self._tied.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {"refs": self.refs, "_tied": self._tied}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def store(pieces: Iterable[Mapping[str, Tensor]]) -> tuple[Any, ...]:
    """Put weights into the object store from this process, and return a reference for each piece."""
    return tuple(ray.put({name: tensor_as_array(tensor) for name, tensor in piece.items()}) for piece in pieces)


class WeightHolder(Protocol):
    """A server on a node: the methods for weights."""

    node: str

    async def hold(self, weights: StoredWeights, at: Path | None, adapter: Mapping[str, Any] | None) -> Path:
        """Return the folder of `weights` on its node, as a checkpoint: `at`, if they are there, else newly written."""
        ...


class NodeWeights(WrittenWeights):
    """Weights with one checkpoint per node in its memory, written when the first server asks for it."""

    def __init__(self, stored: StoredWeights, adapter: Mapping[str, Any] | None) -> None:
        super().__init__(Path("on its node"), is_adapter=adapter is not None)
        self._stored = stored
        self._adapter = adapter
        self._at: dict[str, Path] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def folder_at(self, server: RunningServer | None) -> Path:
        """Return the checkpoint on the server's node."""
        holder: WeightHolder = server  # type: ignore[assignment]  # places start no others
        async with self._locks.setdefault(holder.node, asyncio.Lock()):
            self._at[holder.node] = await holder.hold(self._stored, self._at.get(holder.node), self._adapter)
        return self._at[holder.node]


class NodeStore:
    """Weights for servers on other nodes, which a pool keeps as references."""

    keeps: ClassVar[bool] = True

    def __init__(self, adapter: Mapping[str, Any] | None = None) -> None:
        """Take weights, or with peft's settings of one an adapter."""
        self._adapter = adapter

    def write(self, weights: Mapping[str, Any]) -> NodeWeights:
        """Put weights into the object store, and keep references."""
        return NodeWeights(StoredWeights.put(weights), self._adapter)

    def close(self) -> None:
        """Do nothing: each server removes the files that it wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model's folder for every node: under one path, or as files in the object store."""

    path: Path | None
    files: Mapping[str, Any]
    """Name -> reference to the bytes, if no path is visible on every node."""

    @classmethod
    def of(cls, folder: ModelFolder) -> ModelFiles:
        """Take a folder; one that was written for this run exists on this node only: its files are read, and it is
        removed."""
        if not folder.is_temporary:
            return cls(path=folder.path.resolve(), files={})
        paths = sorted(path for path in folder.path.rglob("*") if path.is_file())
        files = {str(p.relative_to(folder.path)): ray.put(p.read_bytes()) for p in paths}
        shutil.rmtree(folder.path, ignore_errors=True)
        return cls(path=None, files=files)

    def here(self, *, only: str = "") -> ModelFolder:
        """Return the folder on this node, or one with its file `only`."""
        if self.path is not None:
            return ModelFolder(self.path, is_temporary=False)
        folder = Path(tempfile.mkdtemp(prefix="polyturn-model-"))
        for name, ref in self.files.items():
            if only in ("", name):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(ray.get(ref))
        return ModelFolder(folder, is_temporary=True)
