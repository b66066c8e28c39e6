"""verl.protocol: `DataProto`, a batch as reward functions and agent loops read it: tensors, other columns, and facts of all.

    data = DataProto.from_dict(tensors={"responses": ids_BR}, non_tensors={"uid": ["a", "b"]}, meta_info={"step": 1})
    data[0].batch["responses"]   data[[1, 0]]   data.union(more)   DataProto.concat([data, more])

What fails raises a BatchError, where verl asserts. What spreads a batch over Ray's workers (futures, dispatch) is not here,
because no worker takes one.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from polyturn.compat.verl.batch_bytes import (
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)
from polyturn.compat.verl.batch_errors import check, mini_batches
from polyturn.compat.verl.batch_union import same, union_numpy_dict, union_tensor_dict

__all__ = [
    "DataProto", "DataProtoItem", "collate_fn", "deserialize_single_tensor", "deserialize_tensordict", "fold_batch_dim",
    "pad_dataproto_to_divisor", "serialize_single_tensor", "serialize_tensordict", "unfold_batch_dim", "union_numpy_dict",
    "union_tensor_dict", "unpad_dataproto",
]  # fmt: skip


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
    """Facts about all rows."""

    def __post_init__(self) -> None:
        self.check_consistency()

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Take what `__getstate__` returned."""
        self.__dict__.update(state)
        self.check_consistency()

    def check_consistency(self) -> None:
        """Check that the tensors have one axis of rows, and every column is an array with as many.

        Raises:
            BatchError: one is not.
        """
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        check(
            self.batch is None or len(self.batch.batch_size) == 1, "a batch has one axis of rows; num_batch_dims must be 1"
        )
        for key, column in self.non_tensor_batch.items():
            kind = type(column).__name__
            check(isinstance(column, np.ndarray), f"the column {key!r} is a {kind}; it must be an array of numpy")
            check(len(column) == len(self), f"the column {key!r} has {len(column)} rows where the batch has {len(self)}")

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Any] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """Make a batch of tensors [B, …] and of sequences of B objects.

        Args:
            tensors: Column -> tensor.
            non_tensors: Column -> objects.
            meta_info: What holds for all rows.
            num_batch_dims: How many leading axes number the rows; more than one for tensors alone.
            auto_padding: Of no effect, because no worker needs equal parts.

        Raises:
            BatchError: they have not as many rows.
        """
        from tensordict import TensorDict

        given = dict(tensors or {})
        sizes = {key: tuple(tensor.shape[:num_batch_dims]) for key, tensor in given.items()}
        check(len(set(sizes.values())) < 2, f"the tensors of a batch must have as many rows; these have {sizes}")
        check(num_batch_dims == 1 or not non_tensors, "columns of objects have one axis; num_batch_dims must be 1")
        batch = TensorDict(given, batch_size=list(next(iter(sizes.values())))) if given else None
        columns = {key: _column(values) for key, values in (non_tensors or {}).items()}
        return cls(batch, columns, {} if meta_info is None else meta_info)

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> Self:
        """Make a batch of a mapping in which tensors are tensors and arrays are other columns."""
        columns = {key: value for key, value in data.items() if isinstance(value, np.ndarray)}
        return cls.from_dict({key: value for key, value in data.items() if key not in columns}, columns, meta_info)

    @classmethod
    def from_tensordict(cls, tensor_dict: Any, meta_info: dict[str, Any] | None = None, num_batch_dims: int = 1) -> Self:
        """Make a batch of a tensordict, whose lists are columns of objects and whose facts hold for all rows."""
        from tensordict import NonTensorData, NonTensorStack

        tensors: dict[str, Any] = {}
        columns: dict[str, Any] = {}
        facts = {} if meta_info is None else dict(meta_info)
        for key in list(tensor_dict.keys()):
            value = tensor_dict.get(key)
            if isinstance(value, NonTensorStack):
                columns[key] = value.tolist()
            elif isinstance(value, NonTensorData):
                facts[key] = value.data
            else:
                tensors[key] = value
        return cls.from_dict(tensors, columns, facts, num_batch_dims)

    def to_tensordict(self) -> Any:
        """Return a tensordict, as `from_tensordict` reads it."""
        from polyturn.compat.verl.tensordict_utils import get_tensordict

        columns = {key: column.tolist() for key, column in self.non_tensor_batch.items()}
        tensors = {} if self.batch is None else dict(self.batch.items())
        return get_tensordict({**tensors, **columns}, self.meta_info)

    def save_to_disk(self, filepath: str | Path) -> None:
        """Write the batch to a file."""
        with Path(filepath).open("wb") as file:
            pickle.dump(self, file)

    @staticmethod
    def load_from_disk(filepath: str | Path) -> DataProto:
        """Return a batch of a file that `save_to_disk` wrote. Read none of a stranger: reading one can run code.

        Raises:
            BatchError: the file holds something else.
        """
        with Path(filepath).open("rb") as file:
            found = pickle.load(file)
        check(isinstance(found, DataProto), f"{str(filepath)!r} holds a {type(found).__name__}, not a DataProto")
        return found  # type: ignore[no-any-return]

    def to(self, device: Any) -> Self:
        """Move the tensors to a device, and return this batch."""
        self.batch = None if self.batch is None else self.batch.to(device)
        return self

    def __len__(self) -> int:
        """Return B."""
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return len(next(iter((self.non_tensor_batch or {}).values()), ()))

    def __getitem__(self, item: Any) -> Any:
        """Return a row for a number; a batch for a slice, or for a list or array of numbers or of truth values."""
        if isinstance(item, int | np.integer):
            row = None if self.batch is None else self.batch[int(item)]
            return DataProtoItem(row, {key: column[item] for key, column in self.non_tensor_batch.items()}, self.meta_info)
        which = item if isinstance(item, slice) else np.asarray(item)
        if not isinstance(which, slice) and which.dtype.kind not in "iub":
            raise TypeError(f"Indexing with {type(item)} is not supported")
        columns = {key: column[which] for key, column in self.non_tensor_batch.items()}
        batch = None if self.batch is None else self.batch[which if isinstance(which, slice) else _rows(which)]
        return type(self)(batch, columns, self.meta_info)

    def select_idxs(self, idxs: Any) -> DataProto:
        """Return some of the rows, by numbers or truth values."""
        return self[idxs]  # type: ignore[no-any-return]

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Return the rows of a range."""
        return self[start:end:step]  # type: ignore[no-any-return]

    def reorder(self, indices: Any) -> None:
        """Put the rows into another order, in this batch."""
        ordered = self[indices]
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Give tensors other names, and return this batch.

        Raises:
            BatchError: there are not as many new names as old ones.
        """
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        check(len(old) == len(new), f"{len(old)} tensors are to have {len(new)} new names")
        for former, name in zip(old, new, strict=True):
            self.batch.rename_key_(former, name)
        return self

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """Return a batch of some of the columns; None keeps all of a kind."""
        found = type(self)(
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
    ) -> Self:
        """Take columns out, and return them as a batch of their own."""
        return self.from_dict(
            {key: self.batch.pop(key) for key in batch_keys or ()},
            {key: self.non_tensor_batch.pop(key) for key in non_tensor_batch_keys or ()},
            {key: self.meta_info.pop(key) for key in meta_info_keys or ()},
        )

    def union(self, other: DataProto) -> Self:
        """Take the columns of a batch of the same rows in, and return this one.

        Raises:
            BatchError: a column or a fact is in both and differs.
        """
        if other.batch is not None:
            self.batch = other.batch if self.batch is None else union_tensor_dict(self.batch, other.batch)
        union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch)
        for key, fact in other.meta_info.items():
            check(key not in self.meta_info or same(self.meta_info[key], fact), f"the fact {key!r} is in both and differs")
            self.meta_info[key] = fact
        return self

    def make_iterator(
        self, mini_batch_size: int, epochs: int, seed: int | None = None, dataloader_kwargs: Any = None
    ) -> Iterator[DataProto]:
        """Return mini-batches of so many epochs; `dataloader_kwargs` go to a torch DataLoader over the rows.

        Raises:
            BatchError: the rows cannot be parted equally.
        """
        batches = mini_batches(len(self), mini_batch_size, epochs, seed, dataloader_kwargs)
        return (self[which] for which in batches)

    def chunk(self, chunks: int) -> list[DataProto]:
        """Return as many batches of equal size.

        Raises:
            BatchError: the rows cannot be parted equally.
        """
        parts = len(self) % chunks == 0
        check(parts, f"only support equal chunk. Got size of DataProto {len(self)} and chunk {chunks}.")
        return self.split(len(self) // chunks)

    def split(self, split_size: int) -> list[DataProto]:
        """Return batches of `split_size` rows; the last one may have fewer."""
        return [self[start : start + split_size] for start in range(0, len(self), split_size)]

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Return every row so many times: each behind itself (`interleave`), or the whole batch behind itself."""
        rows = np.arange(len(self))
        repeated: DataProto = self[np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times)]
        return repeated

    def sample_level_repeat(self, repeat_times: Any) -> DataProto:
        """Return each row as often as its number in `repeat_times` [B] says.

        Raises:
            BatchError: there is not a number for each row.
        """
        times = np.asarray(repeat_times)
        check(times.shape == (len(self),), f"give a number for each of the {len(self)} rows; there are {times.shape}")
        return self[np.repeat(np.arange(len(self)), times)]  # type: ignore[no-any-return]

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> DataProto:
        """Return each row as `n_split` rows, with a part of each column of `split_keys` and all of the others."""
        parted = set(split_keys or ())
        rows = np.repeat(np.arange(len(self)), n_split)

        def parts(key: str, column: Any) -> Any:
            if key in parted:
                column = np.array(column.tolist(), dtype=object) if column.ndim == 1 else column
                return column.reshape(len(rows), column.shape[1] // n_split, *column.shape[2:])
            return column[rows]

        tensors = {} if self.batch is None else {key: parts(key, tensor) for key, tensor in self.batch.items()}
        columns = {key: parts(key, column) for key, column in self.non_tensor_batch.items()}
        return type(self).from_dict(tensors, columns, self.meta_info)

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Return the rows of several batches with the same columns, one batch behind the other.

        The fact `metrics`, a mapping or a list of them in each, becomes a mapping of lists.

        Raises:
            BatchError: a fact of two batches differs.
        """
        import torch

        batch = None if data[0].batch is None else torch.cat([one.batch for one in data])
        columns = {key: np.concatenate([one.non_tensor_batch[key] for one in data]) for key in data[0].non_tensor_batch}
        facts: dict[str, Any] = {}
        metrics: dict[str, list[Any]] = {}
        for one in data:
            for key, value in one.meta_info.items():
                if key == "metrics":
                    for mapping in value if isinstance(value, list) else [value]:
                        for name, number in mapping.items():
                            metrics.setdefault(name, []).append(number)
                    continue
                check(key not in facts or same(facts[key], value), f"Conflicting values for meta_info key '{key}'")
                facts[key] = value
        return type(data[0])(batch, columns, {**facts, **({"metrics": metrics} if metrics else {})})


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Return a batch of rows."""
    import torch

    columns = {key: _column([item.non_tensor_batch[key] for item in x]) for key in x[0].non_tensor_batch}
    return DataProto(torch.stack([item.batch for item in x]).contiguous(), columns)


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Return the rows and, behind them, as many of them again as make their number divisible; and how many."""
    missing = -len(data) % size_divisor
    return (data[np.arange(len(data) + missing) % len(data)] if missing else data), missing


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Return the rows without the last `pad_size`."""
    return data[:-pad_size] if pad_size else data  # type: ignore[no-any-return]


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Return [B, …] columns as [new_batch_size, B // new_batch_size, …].

    Raises:
        BatchError: the rows cannot be parted equally.
    """
    check(len(data) % new_batch_size == 0, f"{len(data)} rows cannot be parted into {new_batch_size}")
    batch = data.batch.view(new_batch_size, -1)
    batch.auto_batch_size_(batch_dims=1)
    columns = {key: v.reshape(new_batch_size, -1, *v.shape[1:]) for key, v in data.non_tensor_batch.items()}
    return type(data)(batch, columns, data.meta_info)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Return columns whose first `batch_dims` axes are one."""
    batch = data.batch.copy()
    batch.auto_batch_size_(batch_dims=batch_dims)
    columns = {key: v.reshape(-1, *v.shape[batch_dims:]) for key, v in data.non_tensor_batch.items()}
    return type(data)(batch.reshape(-1), columns, data.meta_info)


def _rows(which: Any) -> Any:
    """Return an array of rows as the tensor that tensordicts are indexed by."""
    import torch

    return torch.from_numpy(which)


def _column(values: Any) -> Any:
    """Return [B] objects as an array of one dimension, also where each is a list."""
    if isinstance(values, np.ndarray):
        return values
    column = np.empty(len(values), dtype=object)
    column[:] = list(values)
    return column


def _some(columns: Mapping[str, Any], keys: Sequence[str] | None) -> dict[str, Any]:
    return dict(columns) if keys is None else {key: columns[key] for key in keys}
