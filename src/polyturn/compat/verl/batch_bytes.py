"""Tensors of verl's batch as bytes, which is how its workers hand them on: types, shapes and contents.

serialize_single_tensor(ids_BR)  ->  ("int64", (2, 3), array of bytes)
"""

from __future__ import annotations

from typing import Any


def serialize_single_tensor(obj: Any) -> tuple[str, tuple[int, ...], Any]:
    """Return a tensor as its type, its shape and its bytes."""
    import torch

    return str(obj.dtype).removeprefix("torch."), tuple(obj.shape), obj.flatten().contiguous().view(torch.uint8).numpy()


def deserialize_single_tensor(arr: Any) -> Any:
    """Return the tensor that `serialize_single_tensor` took apart."""
    import torch

    dtype, shape, data = arr
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(getattr(torch, dtype)).view(shape)


def serialize_tensordict(batch: Any) -> tuple[tuple[int, ...], str | None, dict[str, Any]]:
    """Return a tensordict as its batch size, its device and its tensors, a ragged one as its layout and its rows."""
    items: dict[str, Any] = {}
    for key, tensor in batch.items():
        rows = [serialize_single_tensor(row) for row in tensor.unbind()] if tensor.is_nested else None
        items[key] = serialize_single_tensor(tensor) if rows is None else (str(tensor.layout).removeprefix("torch."), rows)
    return tuple(batch.batch_size), None if batch.device is None else str(batch.device), items


def deserialize_tensordict(arr: Any) -> Any:
    """Return the tensordict that `serialize_tensordict` took apart."""
    import torch
    from tensordict import TensorDict

    size, device, items = arr
    tensors: dict[str, Any] = {}
    for key, item in items.items():
        if len(item) == 3:
            tensors[key] = deserialize_single_tensor(item)
        else:
            rows = [deserialize_single_tensor(row) for row in item[1]]
            tensors[key] = torch.nested.as_nested_tensor(rows, layout=getattr(torch, item[0]))
    return TensorDict(tensors, batch_size=size, device=device)
