"""ArraySocket: sends objects with large arrays to another process of this machine, which maps the arrays without a copy.

    one byte  + a descriptor of anonymous memory with the sizes, the pickle, and every large array of the object

    packed = Packed.of(samples);  for rank in ranks: rank.send(packed)         everything is copied into memory once
    samples = socket.receive()                                                 arrays over that memory

A receiver may write into an array without affecting others, because the first write copies the page. The memory has no name
in the file system, so it is freed with the last process that holds it, however that process ends. The receiver unpickles
whatever arrives, so no untrusted process may be able to connect to the socket.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import mmap
import os
import pickle
import socket
import struct
import sys
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import cloudpickle
import numpy as np

_LARGE = 1 << 12
"""Size in bytes from which an array is a part of its own, outside the pickle."""
_ALIGN = 64


def anonymous_memory(name: str) -> int:
    """Return a descriptor of memory that has no name in the file system; `name` is shown in /proc."""
    if sys.platform == "linux":
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def tensor_as_array(tensor: Any) -> tuple[np.ndarray[Any, Any], str, tuple[int, ...]]:
    """Convert a tensor to (its bytes on the CPU, the name of its dtype, its shape)."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def tensor_over(data: np.ndarray[Any, Any], dtype: str, shape: tuple[int, ...]) -> Any:
    """Undo `tensor_as_array`: return a tensor on the memory of `data`, which may be read-only."""
    import torch

    with warnings.catch_warnings():  # torch has no read-only tensors, and warns when one uses read-only memory
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape)


class Packed(NamedTuple):
    """An object, ready to be sent to any number of processes."""

    fd: int
    """Descriptor of the memory: the number of parts and their sizes, then the parts, which are the pickle and each array."""

    @classmethod
    def of(cls, value: object) -> Self:
        """Pack an object; classes and functions of the main script are included by value.

        Raises:
            TypeError, AttributeError, pickle.PicklingError: part of it cannot be pickled.
        """
        arrays: list[pickle.PickleBuffer] = []
        into = io.BytesIO()
        _Pickler(into, arrays).dump(value)
        parts = [into.getbuffer(), *(array.raw() for array in arrays)]
        sizes = [part.nbytes for part in parts]
        head = struct.pack(f"<{len(sizes) + 1}Q", len(sizes), *sizes)
        *starts, total = _bounds(sizes)
        fd = anonymous_memory("polyturn-arrays")
        os.ftruncate(fd, total)
        with mmap.mmap(fd, total) as memory:
            for part, start in zip((memoryview(head), *parts), (0, *starts), strict=True):
                memory[start : start + part.nbytes] = part
        return cls(fd)

    def close(self) -> None:
        """Release the memory; receivers keep their mapping."""
        os.close(self.fd)


class ArraySocket:
    """One end of a connected Unix socket; `receive` blocks."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def fileno(self) -> int:
        """Return the descriptor of the socket, for `select` and `poll`."""
        return self._socket.fileno()

    def send(self, packed: Packed) -> None:
        """Send an object.

        Raises:
            OSError: the other end is gone.
        """
        socket.send_fds(self._socket, [b"."], [packed.fd])

    def receive(self) -> Any:
        """Return the next object.

        Raises:
            ConnectionError: the other end is gone.
        """
        _, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not fds:
            raise ConnectionError("the other process hung up")
        try:
            memory = memoryview(mmap.mmap(fds[0], 0, access=mmap.ACCESS_COPY))
        finally:
            os.close(fds[0])
        (count,) = struct.unpack_from("<Q", memory)
        sizes = struct.unpack_from(f"<{count}Q", memory, 8)
        data, *arrays = [memory[start : start + size] for start, size in zip(_bounds(sizes), sizes, strict=False)]
        return pickle.loads(data, buffers=arrays)

    def close(self) -> None:
        """Close the connection; a thread that waits in `receive` gets an error."""
        with contextlib.suppress(OSError):  # the other end hung up first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class _Pickler(cloudpickle.Pickler):
    """Pickles an object without its large arrays, and treats tensors as arrays."""

    def __init__(self, into: io.BytesIO, arrays: list[pickle.PickleBuffer]) -> None:
        def is_small(array: pickle.PickleBuffer) -> bool:
            if array.raw().nbytes < _LARGE:
                return True
            arrays.append(array)
            return False

        super().__init__(into, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=is_small)

    def reducer_override(self, obj: Any) -> Any:
        """Reduce an object to a function and arguments that rebuild it."""
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and obj.layout is torch.strided and not obj.is_quantized:
            return tensor_over, tensor_as_array(obj)
        return super().reducer_override(obj)


def _bounds(sizes: Sequence[int]) -> list[int]:
    """Return the start of each part in the memory, and the end of the last part."""
    return list(itertools.accumulate(-(-size // _ALIGN) * _ALIGN for size in (8 * (len(sizes) + 1), *sizes)))
