"""ArraySocket: sends objects with large arrays to another process of this machine, which maps the arrays without a copy.

    [ sizes ][ pickle ]  + a descriptor of anonymous memory that holds every large array of the object

    packed = Packed.of(samples);  for rank in ranks: rank.send(packed)         the arrays are copied into memory once
    samples = socket.receive()                                                 arrays over that memory

A receiver may write into an array without affecting others, because the first write copies the page. The memory has no name
in the file system, so it is freed with the last process that holds it, however that process ends. The receiver unpickles
whatever arrives, so no untrusted process may be able to connect to the socket.
"""

from __future__ import annotations

import contextlib
import io
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

_HEAD = struct.Struct("<QI")
"""The header: length of the pickle in bytes, and the number of large arrays."""
_SIZE = struct.Struct("<Q")
_LARGE = 1 << 12
"""Size in bytes from which an array is sent in shared memory."""
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

    data: bytes
    sizes: tuple[int, ...]
    fd: int
    """Descriptor of the memory with the large arrays; -1 if there are none."""

    @classmethod
    def of(cls, value: object) -> Self:
        """Pack an object; classes and functions of the main script are included by value.

        Raises:
            TypeError, AttributeError, pickle.PicklingError: part of it cannot be pickled.
        """
        arrays: list[pickle.PickleBuffer] = []
        into = io.BytesIO()
        _Pickler(into, arrays).dump(value)
        views = [array.raw() for array in arrays]
        sizes = tuple(view.nbytes for view in views)
        fd = anonymous_memory("polyturn-arrays") if views else -1
        if views:
            os.ftruncate(fd, _total(sizes))
            with mmap.mmap(fd, _total(sizes)) as memory:
                for view, start in zip(views, _starts(sizes), strict=True):
                    memory[start : start + view.nbytes] = view
        return cls(into.getvalue(), sizes, fd)

    def close(self) -> None:
        """Release the memory; receivers keep their mapping."""
        if self.fd >= 0:
            os.close(self.fd)


class ArraySocket:
    """One end of a connected Unix socket; `send` and `receive` block."""

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
        head = _HEAD.pack(len(packed.data), len(packed.sizes)) + b"".join(map(_SIZE.pack, packed.sizes))
        if packed.fd >= 0:
            sent = socket.send_fds(self._socket, [head], [packed.fd])
            self._socket.sendall(head[sent:])
        else:
            self._socket.sendall(head)
        self._socket.sendall(packed.data)

    def receive(self) -> Any:
        """Return the next object.

        Raises:
            ConnectionError: the other end is gone.
        """
        head, fds, _, _ = socket.recv_fds(self._socket, _HEAD.size, 1)
        try:
            length, count = _HEAD.unpack(head + self._exactly(_HEAD.size - len(head)))
            sizes = [_SIZE.unpack(self._exactly(_SIZE.size))[0] for _ in range(count)]
            data = self._exactly(length)
            views: list[memoryview] = []
            if count:
                memory = memoryview(mmap.mmap(fds[0], _total(sizes), access=mmap.ACCESS_COPY))
                views = [memory[start : start + size] for start, size in zip(_starts(sizes), sizes, strict=True)]
        finally:
            for fd in fds:
                os.close(fd)
        return pickle.loads(data, buffers=views)

    def close(self) -> None:
        """Close the connection; a thread that waits in `receive` gets an error."""
        with contextlib.suppress(OSError):  # the other end hung up first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        rest = memoryview(data)
        while rest:
            received = self._socket.recv_into(rest)
            if not received:
                raise ConnectionError("the other process hung up")
            rest = rest[received:]
        return bytes(data)


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


def _starts(sizes: Sequence[int]) -> list[int]:
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += -(-size // _ALIGN) * _ALIGN
    return starts


def _total(sizes: Sequence[int]) -> int:
    return sum(-(-size // _ALIGN) * _ALIGN for size in sizes)
