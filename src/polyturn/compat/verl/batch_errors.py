"""Shared by verl's two forms of a batch: the error that they raise where verl asserts, and mini-batches of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class BatchError(ValueError, AssertionError):
    """A batch cannot be made or changed as asked; code that was written for verl catches an AssertionError."""


def check(is_right: bool, otherwise: str) -> None:
    """Raise a BatchError unless something holds."""
    if not is_right:
        raise BatchError(otherwise)


def mini_batches(
    num_rows: int, size: int, epochs: int, seed: int | None, dataloader_kwargs: Mapping[str, Any] | None
) -> Iterator[list[int]]:
    """Yield the rows of the mini-batches of so many epochs; `dataloader_kwargs` go to a torch DataLoader over the rows.

    Raises:
        BatchError: the rows cannot be parted equally.
    """
    import torch
    from torch.utils.data import DataLoader

    check(num_rows % size == 0, f"{num_rows} rows % {size} != 0")
    options: dict[str, Any] = dict(dataloader_kwargs or {})
    if seed is not None:
        options["generator"] = torch.Generator().manual_seed(seed)
    rows: Any = list(range(num_rows))
    loader = DataLoader(rows, batch_size=size, collate_fn=list, **options)
    return (which for _ in range(epochs) for which in loader)
