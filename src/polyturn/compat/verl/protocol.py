"""verl.protocol: `DataProto`, a batch as reward functions and agent loops read it: tensors, other columns, and facts of all.

    data = DataProto.from_dict(tensors={"responses": ids_BR}, non_tensors={"uid": ["a", "b"]}, meta_info={"step": 1})
    data[0].batch["responses"]   data[[1, 0]]   data.union(more)   DataProto.concat([data, more])

What spreads a batch over workers (padding, futures, dispatch) is not here, because no worker takes one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["DataProto", "DataProtoItem", "collate_fn"]


@dataclass
class DataProtoItem:
    """One row."""

    batch: Any = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto:
    """A batch of B rows."""

    batch: Any = None
    """A tensordict of batch size [B], or None."""
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    """Column -> array [B] of objects."""
    meta_info: dict[str, Any] = field(default_factory=dict)
    """What holds for all rows."""

    def __post_init__(self) -> None:
        for key, column in self.non_tensor_batch.items():
            if not isinstance(column, np.ndarray):
                raise ValueError(f"the column {key!r} is a {type(column).__name__}; it must be an array of numpy")
            if len(column) != len(self):
                raise ValueError(f"the column {key!r} has {len(column)} rows where the batch has {len(self)}")

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Any] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> DataProto:
        """Make a batch of tensors [B, …] and of sequences of B objects.

        Raises:
            ValueError: they have not as many rows.
        """
        from tensordict import TensorDict

        given = dict(tensors or {})
        sizes = {key: len(tensor) for key, tensor in given.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"the tensors of a batch must have as many rows; these have {sizes}")
        batch = TensorDict(given, batch_size=[next(iter(sizes.values()))]) if given else None
        columns = {key: _column(values) for key, values in (non_tensors or {}).items()}
        return cls(batch, columns, {} if meta_info is None else meta_info)

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: dict[str, Any] | None = None) -> DataProto:
        """Make a batch of a mapping in which tensors are tensors and arrays are other columns."""
        columns = {key: value for key, value in data.items() if isinstance(value, np.ndarray)}
        return cls.from_dict({key: value for key, value in data.items() if key not in columns}, columns, meta_info)

    def __len__(self) -> int:
        """Return B."""
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return len(next(iter(self.non_tensor_batch.values()), ()))

    def __getitem__(self, item: Any) -> Any:
        """Return a row for a number; a batch for a slice, or for a list or array of numbers or of truth values."""
        if isinstance(item, int | np.integer):
            row = None if self.batch is None else self.batch[int(item)]
            return DataProtoItem(row, {key: column[item] for key, column in self.non_tensor_batch.items()}, self.meta_info)
        which = item if isinstance(item, slice) else np.asarray(item)
        if not isinstance(which, slice) and which.dtype.kind not in "iub":
            raise TypeError(f"Indexing with {type(item)} is not supported")
        columns = {key: column[which] for key, column in self.non_tensor_batch.items()}
        return DataProto(None if self.batch is None else self.batch[which], columns, self.meta_info)

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Return a batch of some of the columns; None keeps all of a kind."""
        found = DataProto(
            self.batch if self.batch is None or batch_keys is None else self.batch.select(*batch_keys),
            _some(self.non_tensor_batch, non_tensor_batch_keys),
            _some(self.meta_info, meta_info_keys),
        )
        return copy.deepcopy(found) if deepcopy else found

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Take columns out, and return them as a batch of their own."""
        return DataProto.from_dict(
            {key: self.batch.pop(key) for key in batch_keys or ()},
            {key: self.non_tensor_batch.pop(key) for key in non_tensor_batch_keys or ()},
            {key: self.meta_info.pop(key) for key in meta_info_keys or ()},
        )

    def union(self, other: DataProto) -> DataProto:
        """Take the columns of a batch of the same rows in, and return this one.

        Raises:
            ValueError: a tensor is in both and differs.
        """
        if other.batch is not None:
            held = {} if self.batch is None else dict(self.batch.items())
            for key, tensor in other.batch.items():
                if key in held and not held[key].equal(tensor):
                    raise ValueError(f"the tensor {key!r} is in both batches and differs")
            self.batch = other.batch if self.batch is None else self.batch.update(other.batch)
        self.non_tensor_batch.update(other.non_tensor_batch)
        self.meta_info.update(other.meta_info)
        return self

    def chunk(self, chunks: int) -> list[DataProto]:
        """Return as many batches of equal size.

        Raises:
            ValueError: the rows cannot be parted equally.
        """
        if len(self) % chunks:
            raise ValueError(f"only support equal chunk: {len(self)} rows cannot be parted into {chunks}")
        return self.split(len(self) // chunks)

    def split(self, split_size: int) -> list[DataProto]:
        """Return batches of `split_size` rows; the last one may have fewer."""
        return [self[start : start + split_size] for start in range(0, len(self), split_size)]

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Return every row so many times: each behind itself (`interleave`), or the whole batch behind itself."""
        rows = np.arange(len(self))
        repeated: DataProto = self[np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times)]
        return repeated

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Return the rows of several batches with the same columns, one batch behind the other."""
        import torch

        batch = None if data[0].batch is None else torch.cat([one.batch for one in data])
        columns = {key: np.concatenate([one.non_tensor_batch[key] for one in data]) for key in data[0].non_tensor_batch}
        return DataProto(batch, columns, {key: value for one in data for key, value in one.meta_info.items()})


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Return a batch of rows."""
    import torch

    columns = {key: _column([item.non_tensor_batch[key] for item in x]) for key in x[0].non_tensor_batch}
    return DataProto(torch.stack([item.batch for item in x]).contiguous(), columns)


def _column(values: Any) -> Any:
    """Return [B] objects as an array of one dimension, also where each is a list."""
    if isinstance(values, np.ndarray):
        return values
    column = np.empty(len(values), dtype=object)
    column[:] = list(values)
    return column


def _some(columns: Mapping[str, Any], keys: Sequence[str] | None) -> dict[str, Any]:
    return dict(columns) if keys is None else {key: columns[key] for key in keys}
