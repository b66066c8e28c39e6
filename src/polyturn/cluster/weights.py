"""Transport of weights and models through the cluster, in Ray's object store, which copies an object to each node once.

rank 0              store(buckets)                  the controller and the servers' actors only get references
a server's node     ServerActor.hold                one actor per node writes the checkpoint for all servers of the node
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import ray
from torch import Tensor

from polyturn.engines.base import ModelFolder
from polyturn.engines.weights.folder import ServerWeights, WrittenWeights
from polyturn.engines.weights.stream import streamed
from polyturn.infra.array_socket import tensor_as_array, tensor_over


class StoredWeights(Mapping[str, Any]):
    """Weights in the object store: name -> tensor, backed by the store's memory on the node that reads them."""

    def __init__(self, refs: tuple[Any, ...]) -> None:
        self.refs = refs

    @classmethod
    def put(cls, weights: Mapping[str, Tensor]) -> StoredWeights:
        """Put weights into the object store, tied tensors only once. If the weights are spread over ranks, rank 0 stores
        them instead of this process."""
        return cls(streamed(weights).over(store))

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return {name: tensor_over(*stored) for piece in ray.get(list(self.refs)) for name, stored in piece.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {"refs": self.refs}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def store(pieces: Iterable[Mapping[str, Tensor]]) -> tuple[Any, ...]:
    """Put weights into the object store from this process, and return a reference for each piece."""
    return tuple(ray.put({name: tensor_as_array(tensor) for name, tensor in piece.items()}) for piece in pieces)


class NodeWeights(ServerWeights):
    """Weights with one checkpoint per node, in memory, written when the node's first server requests it."""

    def __init__(self, stored: StoredWeights, adapter: Mapping[str, Any] | None) -> None:
        self._stored = stored
        self._adapter = adapter
        self._at: dict[str, Path] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def load(self, server: Any) -> None:
        """Make a server, whose process is a `NodeServer`, read the checkpoint on its node."""
        process = server.process
        async with self._locks.setdefault(process.node, asyncio.Lock()):
            self._at[process.node] = await process.hold(self._stored, self._at.get(process.node), self._adapter)
        await WrittenWeights(self._at[process.node], is_adapter=self._adapter is not None).load(server)


class NodeStore:
    """Stores weights for servers on other nodes; a pool keeps only references."""

    keeps: ClassVar[bool] = True

    def __init__(self, adapter: Mapping[str, Any] | None = None) -> None:
        """Set peft's settings of the adapter, or None for full weights."""
        self._adapter = adapter

    def write(self, weights: Mapping[str, Any]) -> NodeWeights:
        """Put weights into the object store, and return references."""
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
        """Refer to a folder by its path, or put the files of a temporary folder into the object store and remove it."""
        if not folder.is_temporary:
            return cls(path=folder.path.resolve(), files={})
        paths = sorted(path for path in folder.path.rglob("*") if path.is_file())
        files = {str(p.relative_to(folder.path)): ray.put(p.read_bytes()) for p in paths}
        shutil.rmtree(folder.path, ignore_errors=True)
        return cls(path=None, files=files)

    def here(self, *, only: str = "") -> ModelFolder:
        """Return the folder on this node; a folder from the object store has only the file `only`, if that is set."""
        if self.path is not None:
            return ModelFolder(self.path, is_temporary=False)
        folder = Path(tempfile.mkdtemp(prefix="polyturn-model-"))
        for name, ref in self.files.items():
            if only in ("", name):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(ray.get(ref))
        return ModelFolder(folder, is_temporary=True)
