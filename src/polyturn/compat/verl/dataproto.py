"""verl.protocol: `DataProto`, the batch of reward managers, samplers and agent loops: tensors, columns and metadata.

    data = DataProto.from_dict(tensors={"responses": ids_BR}, non_tensors={"uid": ["a", "b"]}, meta_info={"step": 1})
    data[0].batch["responses"]   data[[1, 0]]   data.select(["responses"])   data.union(more)

Where verl fails an assertion, a BatchError is raised. Methods that distribute a batch to workers or save it to a file are
not offered; `not_offered.py` lists them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from polyturn.compat.not_offered import METHODS, __getattr__  # noqa: F401  (raises for names that are not offered)

__all__ = ["DataProto", "DataProtoItem", "collate_fn", "pad_dataproto_to_divisor", "unpad_dataproto"]


class BatchError(ValueError, AssertionError):
    """A batch cannot be created or changed as requested; code written for verl catches an AssertionError."""


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
    """Metadata of the whole batch."""

    def __post_init__(self) -> None:
        self.check_consistency()

    def __getattr__(self, name: str) -> Any:
        """Raise an error with the reason why a method of verl's batch is not offered."""
        why = f": {METHODS[name]}" if name in METHODS else ""
        raise AttributeError(f"DataProto has no {name!r} here{why}")

    def check_consistency(self) -> None:
        """Check that the tensors have one row axis, and that every column is an array with the same number of rows.

        Raises:
            BatchError: the check fails.
        """
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        check(
            self.batch is None or len(self.batch.batch_size) == 1, "a batch has one axis of rows; num_batch_dims must be 1"
        )
        for key, column in self.non_tensor_batch.items():
            kind = type(column).__name__
            check(isinstance(column, np.ndarray), f"the column {key!r} is a {kind}; it must be a NumPy array")
            check(len(column) == len(self), f"the column {key!r} has {len(column)} rows, but the batch has {len(self)}")

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Any] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """Create a batch from tensors [B, …] and sequences of B objects.

        Args:
            tensors: Column -> tensor.
            non_tensors: Column -> objects.
            meta_info: Metadata of the whole batch.
            num_batch_dims: Must be 1, because rows have one axis.
            auto_padding: Has no effect, because batches are not distributed to workers.

        Raises:
            BatchError: the columns have different numbers of rows.
        """
        from tensordict import TensorDict

        tensors_by_name = dict(tensors or {})
        sizes = {key: tuple(tensor.shape[:num_batch_dims]) for key, tensor in tensors_by_name.items()}
        check(len(set(sizes.values())) < 2, f"the tensors of a batch must have the same number of rows; these have {sizes}")
        check(num_batch_dims == 1 or not non_tensors, "columns of objects have one axis; num_batch_dims must be 1")
        batch = TensorDict(tensors_by_name, batch_size=list(next(iter(sizes.values())))) if tensors_by_name else None
        columns = {key: _column(values) for key, values in (non_tensors or {}).items()}
        return cls(batch, columns, {} if meta_info is None else meta_info)

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> Self:
        """Create a batch from a mapping with tensors, and arrays for the other columns.

        Raises:
            BatchError: a value is neither.
        """
        import torch

        for key, value in data.items():
            kind = type(value).__name__
            check(isinstance(value, torch.Tensor | np.ndarray), f"{key!r} is a {kind}; it must be a tensor or a NumPy array")
        columns = {key: value for key, value in data.items() if isinstance(value, np.ndarray)}
        return cls.from_dict({key: value for key, value in data.items() if key not in columns}, columns, meta_info)

    @classmethod
    def from_tensordict(cls, tensor_dict: Any, meta_info: dict[str, Any] | None = None, num_batch_dims: int = 1) -> Self:
        """Create a batch from a tensordict; its lists become columns of objects, and its other values metadata."""
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

    def to(self, device: Any) -> Self:
        """Move the tensors to a device and return this batch."""
        self.batch = None if self.batch is None else self.batch.to(device)
        return self

    def __len__(self) -> int:
        """Return B."""
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return len(next(iter((self.non_tensor_batch or {}).values()), ()))

    def __getitem__(self, item: Any) -> Any:
        """Return a row for a number; a batch for a slice, or for a list or array of numbers or booleans."""
        if isinstance(item, int | np.integer):
            row = None if self.batch is None else self.batch[int(item)]
            return DataProtoItem(row, {key: column[item] for key, column in self.non_tensor_batch.items()}, self.meta_info)
        rows = np.asarray(item)
        which = item if isinstance(item, slice) else rows if rows.size else rows.astype(int)
        if not isinstance(which, slice) and which.dtype.kind not in "iub":
            raise TypeError(f"Indexing with {type(item)} is not supported")
        columns = {key: column[which] for key, column in self.non_tensor_batch.items()}
        batch = None if self.batch is None else self.batch[which if isinstance(which, slice) else _rows(which)]
        return type(self)(batch, columns, self.meta_info)

    def select_idxs(self, idxs: Any) -> DataProto:
        """Return some of the rows, by numbers or booleans."""
        return self[idxs]  # type: ignore[no-any-return]

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Return the rows of a range."""
        return self[start:end:step]  # type: ignore[no-any-return]

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """Return a batch of some of the columns; None keeps all of a kind."""
        selected = type(self)(
            self.batch if self.batch is None or batch_keys is None else self.batch.select(*batch_keys),
            _some(self.non_tensor_batch, non_tensor_batch_keys),
            _some(self.meta_info, meta_info_keys),
        )
        return copy.deepcopy(selected) if deepcopy else selected

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> Self:
        """Remove columns and return them as a batch."""
        return self.from_dict(
            {key: self.batch.pop(key) for key in batch_keys or ()},
            {key: self.non_tensor_batch.pop(key) for key in non_tensor_batch_keys or ()},
            {key: self.meta_info.pop(key) for key in meta_info_keys or ()},
        )

    def union(self, other: DataProto) -> Self:
        """Add the columns of a batch with the same rows, and return this batch.

        Raises:
            BatchError: a column or metadata value is in both batches and differs, or the numbers of rows differ.
        """
        if other.batch is not None:
            self.batch = other.batch if self.batch is None else _merged(self.batch, other.batch)
        _merged(self.non_tensor_batch, other.non_tensor_batch)
        _merged(self.meta_info, other.meta_info)
        self.check_consistency()
        return self

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Return every row `repeat_times` times: adjacent copies (`interleave`), or copies of the whole batch."""
        rows = np.arange(len(self))
        repeated: DataProto = self[np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times)]
        return repeated

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Concatenate the rows of several batches with the same columns.

        The metadata `metrics`, a dict or a list of dicts of each batch, become one dict with lists of the values.

        Raises:
            BatchError: the batches have different columns, or another metadata value differs.
        """
        import torch

        columns_of = [sorted(one.non_tensor_batch) for one in data]
        check(all(names == columns_of[0] for names in columns_of), f"the batches have different columns: {columns_of}")
        batch = None if data[0].batch is None else torch.cat([one.batch for one in data])
        columns = {key: np.concatenate([one.non_tensor_batch[key] for one in data]) for key in data[0].non_tensor_batch}
        facts: dict[str, Any] = {}
        metrics: list[Mapping[str, Any]] = []
        for key, value in ((key, value) for one in data for key, value in one.meta_info.items()):
            if key == "metrics":
                metrics += value if isinstance(value, list) else [] if value is None else [value]
            else:
                check(same(facts.setdefault(key, value), value), f"Conflicting values for meta_info key '{key}'")
        return type(data[0])(batch, columns, {**facts, "metrics": _lists(metrics)} if metrics else facts)


def check(is_right: bool, otherwise: str) -> None:
    """Raise a BatchError with the message `otherwise` unless `is_right`."""
    if not is_right:
        raise BatchError(otherwise)


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Return rows as a batch."""
    import torch

    columns = {key: _column([item.non_tensor_batch[key] for item in x]) for key in x[0].non_tensor_batch}
    return DataProto(torch.stack([item.batch for item in x]).contiguous(), columns)


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Return the batch padded with its first rows to a multiple of `size_divisor`, and the number of added rows."""
    missing = -len(data) % size_divisor
    return (data[np.arange(len(data) + missing) % len(data)] if missing else data), missing


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Return the rows without the last `pad_size`."""
    return data[:-pad_size] if pad_size else data  # type: ignore[no-any-return]


def _lists(dicts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return key -> its values in the dicts that have it; the first dict must have all keys."""
    lists: dict[str, list[Any]] = {key: [] for key in dicts[0]}
    for key, value in ((key, value) for one in dicts for key, value in one.items()):
        check(key in lists, f"the metric {key!r} is not in the first batch; give every batch the same metrics")
        lists[key].append(value)
    return lists


def _rows(which: Any) -> Any:
    """Return an index array as a tensor, for indexing tensordicts."""
    import torch

    return torch.from_numpy(which)


def _column(values: Any) -> Any:
    """Return [B] objects as a one-dimensional array, even if each is a list."""
    if isinstance(values, np.ndarray):
        return values
    column = np.empty(len(values), dtype=object)
    column[:] = list(values)
    return column


def _some(columns: Mapping[str, Any], keys: Sequence[str] | None) -> dict[str, Any]:
    return dict(columns) if keys is None else {key: columns[key] for key in keys}


def _merged(one: Any, two: Any) -> Any:
    """Add the entries of the second mapping to the first, and return it; common entries must be equal."""
    known = set(one.keys())
    for key, value in two.items():
        is_same = key not in known or same(one[key], value)
        check(is_same, f"`{key}` is in both batches, and they are not the same object")
        one[key] = value
    return one


def same(one: Any, two: Any) -> bool:
    """Return whether two values are recursively equal, with the same types; NaN equals NaN."""
    if one is two or type(one) is not type(two):
        return one is two
    if isinstance(one, np.ndarray):
        if one.dtype != object:
            return np.array_equal(one, two, equal_nan=one.dtype.kind in "fc")
        return one.shape == two.shape and same(one.tolist(), two.tolist())
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, float):
        return one == two or (one != one and two != two)
    equal = getattr(one, "equal", None)  # a tensor's
    return bool(equal(two) if equal else one == two)
