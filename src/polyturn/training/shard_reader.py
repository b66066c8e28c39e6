"""Read a checkpoint's shards without running code from them.

`torch.distributed.checkpoint` pickles two things: the file `.metadata`, and every value that is not a tensor. torch's reader
unpickles both without restriction, so a foreign checkpoint could run code. Here metadata may contain only torch's records of
shapes and files, and values are read like `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from polyturn.core.errors import CheckpointError

METADATA = ".metadata"
"""Name of the file that is written last; a folder with this file is complete."""

_RECORDS = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    (_RECORDS, "Metadata"),
    (_RECORDS, "TensorStorageMetadata"),
    (_RECORDS, "BytesStorageMetadata"),
    (_RECORDS, "ChunkStorageMetadata"),
    (_RECORDS, "TensorProperties"),
    (_RECORDS, "MetadataIndex"),
    (_RECORDS, "StorageMeta"),
    (_RECORDS, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath", "WindowsPath")),
}


class _Unpickler(pickle.Unpickler):
    """Unpickles only the records of a checkpoint's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"the metadata refers to {module}.{name}, which no checkpoint needs")
        if module.startswith("pathlib"):  # the module of a path's class differs between versions of Python
            return getattr(pathlib, name)
        return super().find_class(module, name)


class ShardReader(FileSystemReader):
    """torch's reader of a folder of shards, with metadata that cannot run code."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = folder / METADATA

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the file `.metadata`.

        Raises:
            CheckpointError: the file is not metadata of a checkpoint.
            pickle.UnpicklingError: the file refers to anything but records of shapes and files.
        """
        with self._metadata.open("rb") as file:
            metadata = read_records(file)
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{self._metadata} holds {type(metadata).__name__}, not the metadata of a checkpoint")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_records(file: BinaryIO) -> Any:
    """Unpickle records of shapes and files.

    Raises:
        pickle.UnpicklingError: the file refers to anything else.
    """
    return _Unpickler(file).load()


class LoadPlanner(DefaultLoadPlanner):
    """torch's load planner, with values that cannot run code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value that is not a tensor.

        Raises:
            pickle.UnpicklingError: it contains anything but plain values and tensors.
        """
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def load(state: dict[str, Any], folder: Path, *, group: Any = None) -> None:
    """Fill the tensors and values of `state` from a folder of shards; collective over `group`, if there is one."""
    dcp.load(state, storage_reader=ShardReader(folder), planner=LoadPlanner(), process_group=group, no_dist=group is None)
