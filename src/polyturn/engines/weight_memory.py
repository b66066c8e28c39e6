"""WeightMemory: two copies of a model's weights in memory shared by two processes; one is read while the other is written.

    slot 0   [ embed_tokens | q_proj | k_proj | ... ]   <- the engine samples from this one
    slot 1   [ embed_tokens | q_proj | k_proj | ... ]   <- the trainer writes the next version here; then they swap

No request reads half-updated weights, because a live slot is never written. Swapping slots copies nothing. The memory has no
name in the file system, so it is freed with the last process that holds it, however that process ends.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from polyturn.core.errors import EngineError, did_you_mean
from polyturn.infra.array_socket import anonymous_memory

_ALIGN = 64
NUM_SLOTS = 2


class TensorSlot(NamedTuple):
    """The position of a tensor in a slot."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class WeightMemory:
    """Two slots of one model's parameters and buffers; unpickles in a process that inherits the descriptor."""

    def __init__(self, fd: int, spans: Sequence[TensorSlot], size: int) -> None:
        """Map the memory of `fd`, with slots of `size` bytes."""
        self.fd = fd
        self._spans = spans
        self._size = size
        self._map = mmap.mmap(fd, max(1, NUM_SLOTS * size))
        self._views: dict[int, dict[str, Tensor]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.fd, self._spans, self._size)

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Make memory for the tensors of `model`; tied tensors share a position."""
        spans, offset = [], 0
        for name, tensor in tensors_of(model).items():
            spans.append(TensorSlot(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
            offset = -(-(offset + tensor.nbytes) // _ALIGN) * _ALIGN
        fd = anonymous_memory("polyturn-weights")
        os.ftruncate(fd, max(1, NUM_SLOTS * offset))
        return cls(fd, spans, offset)

    def views(self, slot: int) -> dict[str, Tensor]:
        """Return name -> tensor over the memory of a slot."""
        if slot not in self._views:
            memory = torch.frombuffer(memoryview(self._map), dtype=torch.uint8, offset=slot * self._size)
            self._views[slot] = {slot_span.name: _view(memory, slot_span) for slot_span in self._spans}
        return self._views[slot]

    def write(self, slot: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors` into a slot; missing ones are copied from the other slot.

        Raises:
            EngineError: the model has no such tensor, or one of another shape.
        """
        to, other = self.views(slot), self.views(1 - slot)
        for name, tensor in tensors.items():
            if name not in to:
                raise EngineError(f"the model has no parameter {name!r}.{did_you_mean(name, to)}")
            if tensor.shape != to[name].shape:
                raise EngineError(f"the parameter {name!r} has the shape {list(to[name].shape)}, not {list(tensor.shape)}")
        with torch.no_grad():
            for name, view in to.items():
                view.copy_(tensors[name].detach() if name in tensors else other[name])

    def close(self) -> None:
        """Release the memory. Existing tensors over it stay valid."""
        self._views.clear()
        os.close(self.fd)


def _view(memory: Tensor, span: TensorSlot) -> Tensor:
    dtype: torch.dtype = getattr(torch, span.dtype)
    size = math.prod(span.shape) * dtype.itemsize
    return memory[span.offset : span.offset + size].view(dtype).view(span.shape)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> parameter or buffer of `model`; tied ones have their first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def listed_names(model: nn.Module) -> dict[str, str]:
    """Return each name of a parameter or buffer -> its name in `tensors_of`."""
    first = {id(tensor): name for name, tensor in tensors_of(model).items()}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first[id(tensor)] for name, tensor in every}
