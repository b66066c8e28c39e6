"""verl.utils.tensordict_utils: tensordicts of batch size [B] with tensors, ragged tensors, lists of objects, facts of all.

    td = get_tensordict({"ids": ids_BR, "turn_scores": [[], [0.5]]}, {"step": 1})
    get(td, "turn_scores")   pop(td, "step")   chunk_tensordict(td, 2)   concat_tensordict([td, more])

A list is held as a stack of non-tensors; a fact as one. A ragged tensor is nested, with the layout torch.jagged.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from polyturn.compat.verl.batch_errors import check, mini_batches


def assign_non_tensor_data(tensor_dict: TensorDict, key: str, val: Any) -> None:
    """Hold a fact of the whole batch."""
    check(isinstance(tensor_dict, TensorDict), f"a {type(tensor_dict).__name__} is no TensorDict")
    tensor_dict[key] = NonTensorData(val)


def assign_non_tensor_stack(tensor_dict: TensorDict, key: str, val: Sequence[Any]) -> None:
    """Hold a list of B objects, which may be lists or dicts themselves."""
    check(isinstance(tensor_dict, TensorDict), f"a {type(tensor_dict).__name__} is no TensorDict")
    tensor_dict[key] = _stack(val)


def assign_non_tensor_dict(tensor_dict: TensorDict, non_tensor_dict: Mapping[str, Any]) -> TensorDict:
    """Hold facts of the whole batch, lists too, and return the tensordict."""
    for key, val in non_tensor_dict.items():
        assign_non_tensor_data(tensor_dict, key, val)
    return tensor_dict


def assign_non_tensor(tensor_dict: TensorDict, **kwargs: Any) -> TensorDict:
    """Hold lists as B objects and everything else as facts, and return the tensordict."""
    for key, val in kwargs.items():
        if isinstance(val, NonTensorData | NonTensorStack):
            tensor_dict[key] = val
        else:
            (assign_non_tensor_stack if isinstance(val, list) else assign_non_tensor_data)(tensor_dict, key, val)
    return tensor_dict


def unwrap_non_tensor_data(data: Any) -> Any:
    """Return the fact in its box; everything else as it is."""
    return data.data if isinstance(data, NonTensorData) else data


def get_non_tensor_data(data: TensorDict, key: str, default: Any) -> Any:
    """Return a fact."""
    return unwrap_non_tensor_data(data.get(key, default))


def get_tensordict(
    tensor_dict: Mapping[str, Any], non_tensor_dict: Mapping[str, Any] | None = None, batch_size: Any = None
) -> TensorDict:
    """Make a tensordict of tensors [B, …] and lists of B objects, and of facts of all.

    Raises:
        BatchError: they have not as many rows, a ragged tensor is not contiguous and jagged, or a list holds tensors.
    """
    columns: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for key, value in tensor_dict.items():
        check(
            isinstance(value, Tensor | list | NonTensorStack),
            f"{key!r} is a {type(value).__name__}: give a tensor or a list",
        )
        if isinstance(value, Tensor) and value.is_nested:
            check(value.layout == torch.jagged, f"{key!r}: Nested tensors must be jagged, with layout=torch.jagged")
            check(value.is_contiguous(), f"{key!r}: Nested tensors must be contiguous; make it with layout=torch.jagged")
        is_list = isinstance(value, list)
        check(not is_list or not any(isinstance(v, Tensor) for v in value), f"{key!r} is a list of tensors: stack them")
        columns[key] = _stack(value) if is_list else value
        sizes[key] = value.shape[0] if isinstance(value, Tensor) else len(value)
    check(len(set(sizes.values())) < 2, f"the Batch size of the columns is not consistent: {sizes}")
    size = next(iter(sizes.values()), None) if batch_size is None else batch_size
    found = TensorDict(columns, batch_size=[] if size is None else size)
    for key, value in (non_tensor_dict or {}).items():
        found[key] = value if isinstance(value, NonTensorData) else NonTensorData(value)
    return found


def get(tensordict: TensorDict, key: str, default: Any = None) -> Any:
    """Return a tensor, a list of objects or a fact; `default` where there is none."""
    return _plain(tensordict[key]) if key in tensordict else default


def get_keys(tensordict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """Return a tensordict of some of the columns.

    Raises:
        KeyError: one is not there.
    """
    return _of(tensordict, keys, tensordict.get)


def pop(tensordict: TensorDict, key: str = "", default: Any = None, *, keys: Iterable[str] | None = None) -> Any:
    """Take a column out and return it as `get` does; or several, as `pop_keys` does.

    Raises:
        KeyError: one is not there, and no default is given.
    """
    if keys is not None:
        return pop_keys(tensordict, keys)
    if key not in tensordict and default is not None:
        return default
    return _plain(tensordict.pop(key))


def pop_keys(tensordict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """Take columns out and return them as a tensordict of their own.

    Raises:
        KeyError: one is not there.
    """
    return _of(tensordict, keys, tensordict.pop)


def index_select_tensor_dict(batch: TensorDict, indices: Any) -> TensorDict:
    """Return some of the rows, by numbers or truth values."""
    which = torch.as_tensor(indices)
    check(which.dim() == 1, f"the rows are given by a list of one dimension, not of {which.dim()}")
    rows = which.nonzero().flatten().tolist() if which.dtype == torch.bool else which.tolist()
    ragged, others = _parts(batch)
    found = others[which]
    for key, tensor in ragged.items():
        parts = tensor.unbind()
        found[key] = nested_tensor_from_tensor_list([parts[row] for row in rows], _ragged_axis(tensor))
    return found


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Take the columns of the second into the first, and return it.

    Raises:
        BatchError: the batch sizes differ, or a column is in both and differs.
    """
    check(tensor_dict1.batch_size == tensor_dict2.batch_size, "Two tensor dict must have identical batch size")
    for key in list(tensor_dict2.keys()):
        if key in tensor_dict1:
            _check_equal(key, tensor_dict1.get(key), tensor_dict2.get(key))
        else:
            tensor_dict1[key] = tensor_dict2.get(key)
    return tensor_dict1


def assert_tensordict_eq(tensordict1: TensorDict, tensordict2: TensorDict) -> None:
    """Check that two tensordicts hold the same.

    Raises:
        BatchError: a column is in one alone, or differs.
    """
    keys = set(tensordict1.keys()), set(tensordict2.keys())
    check(keys[0] == keys[1], f"these columns are in one alone: {sorted(keys[0] ^ keys[1])}")
    for key in list(tensordict1.keys()):
        _check_equal(key, tensordict1.get(key), tensordict2.get(key))


def chunk_tensordict(td: TensorDict, chunks: int) -> list[TensorDict]:
    """Return as many tensordicts of equal size.

    Raises:
        BatchError: the rows cannot be parted equally.
    """
    check(isinstance(td, TensorDict) and len(td) % chunks == 0, f"expecting td with length divisible by chunks {chunks}")
    rows = torch.arange(len(td)).chunk(chunks)
    return [index_select_tensor_dict(td, part) for part in rows]


def concat_nested_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Return the rows of several ragged tensors, one behind the other.

    Raises:
        BatchError: one is not ragged and contiguous.
    """
    check(all(t.is_nested and t.is_contiguous() and t.dim() > 1 for t in tensors), "give nested, contiguous tensors")
    rows = [row for tensor in tensors for row in tensor.unbind()]
    return nested_tensor_from_tensor_list(rows, _ragged_axis(tensors[0]))


def nested_tensor_from_tensor_list(tensors: Sequence[Tensor], ragged_idx: int | None = None) -> Tensor:
    """Return a ragged tensor of rows that differ in one axis: `ragged_idx`, counted from 1, else where they do."""
    rows = list(tensors)
    if ragged_idx is None:
        differing = [
            axis for axis, sizes in enumerate(zip(*(row.shape for row in rows), strict=True)) if len(set(sizes)) > 1
        ]
        ragged_idx = (differing or [rows[0].dim() - 1])[0] + 1
    check(1 <= ragged_idx <= rows[0].dim(), f"ragged_idx is {ragged_idx}; it must be from 1 to {rows[0].dim()}")
    offsets = torch.tensor([0, *itertools.accumulate(row.shape[ragged_idx - 1] for row in rows)])
    found: Tensor = torch.nested.nested_tensor_from_jagged(
        torch.cat(rows, dim=ragged_idx - 1), offsets, jagged_dim=ragged_idx
    )
    return found


def concat_tensordict(data: Sequence[TensorDict]) -> TensorDict:
    """Return the rows of several tensordicts with the same columns, and the facts of the first.

    Raises:
        BatchError: there is none, or a column is ragged in some alone.
    """
    check(len(data) > 0, "there is no tensordict to concatenate")
    parts = [_parts(td) for td in data]
    names = parts[0][0].keys()
    check(all(ragged.keys() == names for ragged, _ in parts), "All tensordicts must have the same set of nested tensors.")
    if not names and not data[0].batch_size:
        return data[0]
    facts = {key: value for key in list(data[0].keys()) if isinstance(value := data[0].get(key), NonTensorData)}
    found = TensorDict.cat([others.exclude(*facts) for _, others in parts], dim=0)
    for key, fact in facts.items():
        found[key] = NonTensorData(fact.data)
    for key in names:
        found[key] = concat_nested_tensors([ragged[key] for ragged, _ in parts])
    return found


def make_iterator(
    tensordict: TensorDict, mini_batch_size: int, epochs: int, seed: int | None = None, dataloader_kwargs: Any = None
) -> Iterator[TensorDict]:
    """Return mini-batches of so many epochs; `dataloader_kwargs` go to a torch DataLoader over the rows.

    Raises:
        BatchError: the rows cannot be parted equally.
    """
    batches = mini_batches(len(tensordict), mini_batch_size, epochs, seed, dataloader_kwargs)
    return (index_select_tensor_dict(tensordict, torch.as_tensor(which)) for which in batches)


def pad_to_divisor(data: TensorDict, size_divisor: int) -> tuple[TensorDict, int]:
    """Return the rows and, behind them, as many of them again as make their number divisible; and how many."""
    check(isinstance(data, TensorDict), f"a {type(data).__name__} is no TensorDict")
    missing = -len(data) % size_divisor
    if not missing:
        return data, 0
    return index_select_tensor_dict(data, torch.arange(len(data) + missing) % len(data)), missing


def unpad(data: TensorDict, pad_size: int) -> TensorDict:
    """Return the rows without the last `pad_size`."""
    return index_select_tensor_dict(data, torch.arange(len(data) - pad_size)) if pad_size else data


def contiguous(data: TensorDict) -> TensorDict:
    """Return a new tensordict with contiguous tensors."""
    found = TensorDict({}, batch_size=data.batch_size)
    for key in list(data.keys()):
        value = data.get(key)
        found[key] = value.contiguous() if isinstance(value, Tensor) else value
    return found


def _ragged_axis(ragged: Any) -> int:
    """Return in which axis the rows of a ragged tensor may differ, counted from 1."""
    return int(ragged._ragged_idx)


def _stack(values: Iterable[Any]) -> NonTensorStack:
    boxes: Any = [NonTensorData(value) for value in values]
    return NonTensorStack.from_list(boxes)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, NonTensorStack) else unwrap_non_tensor_data(value)


def _of(tensordict: TensorDict, keys: Iterable[str], take: Any) -> TensorDict:
    names = list(keys)
    for key in names:
        if key not in tensordict:
            raise KeyError(f"key {key!r} is not in the tensordict; it has {sorted(tensordict.keys())}")
    found = TensorDict({}, batch_size=tensordict.batch_size)
    for key in names:
        found[key] = take(key)
    return found


def _parts(td: TensorDict) -> tuple[dict[Any, Tensor], TensorDict]:
    """Return the ragged tensors, and everything else."""
    ragged = {key: value for key in list(td.keys()) if isinstance(value := td.get(key), Tensor) and value.is_nested}
    return ragged, (td.exclude(*ragged) if ragged else td)


def _check_equal(key: Any, one: Any, two: Any) -> None:
    check(type(one) is type(two), f"{key!r} is a {type(one).__name__} in one and a {type(two).__name__} in the other")
    if isinstance(one, Tensor):
        ragged = one.is_nested
        check(ragged == two.is_nested, f"{key!r} is nested in one alone")
        rows = list(zip(one.unbind(), two.unbind(), strict=False)) if ragged else [(one, two)]
        same = one.shape[0] == two.shape[0] if ragged else True
        check(same and all(torch.equal(a, b) for a, b in rows), f"`{key}` is in both and not the same")
    else:
        check(_plain(one) == _plain(two), f"`{key}` is in both and not the same")
