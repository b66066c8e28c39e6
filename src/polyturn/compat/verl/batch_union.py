"""The columns of two of verl's batches in one, where what both have is the same.

union_numpy_dict({"uid": u}, {"uid": u, "score": s})  ->  {"uid": u, "score": s}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from polyturn.compat.verl.batch_errors import check


def union_tensor_dict(tensor_dict1: Any, tensor_dict2: Any) -> Any:
    """Take the tensors of the second tensordict into the first, and return it.

    Raises:
        BatchError: the batch sizes differ, or a tensor is in both and differs.
    """
    from polyturn.compat.verl import tensordict_utils

    return tensordict_utils.union_tensor_dict(tensor_dict1, tensor_dict2)


def union_numpy_dict(tensor_dict1: dict[str, Any], tensor_dict2: Mapping[str, Any]) -> dict[str, Any]:
    """Take the arrays of the second mapping into the first, and return it. Two NaN are the same.

    Raises:
        BatchError: an array is in both and differs.
    """
    for key, column in tensor_dict2.items():
        is_same = key not in tensor_dict1 or same(tensor_dict1[key], column)
        check(is_same, f"`{key}` in tensor_dict1 and tensor_dict2 are not the same object.")
        tensor_dict1[key] = column
    return tensor_dict1


def same(one: Any, two: Any, seen: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Return whether two values are equal down to their parts, of the same types; arrays may hold themselves."""
    if one is two or (id(one), id(two)) in seen:
        return True
    if type(one) is not type(two):
        return False
    inside = seen | {(id(one), id(two))}
    if isinstance(one, np.ndarray):
        if one.dtype != object:
            return np.array_equal(one, two, equal_nan=one.dtype.kind in "fc")
        return one.shape == two.shape and all(same(a, b, inside) for a, b in zip(one.flat, two.flat, strict=True))
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(same(a, b, inside) for a, b in zip(one, two, strict=True))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key], inside) for key in one)
    if isinstance(one, float):
        return one == two or (one != one and two != two)
    equal = getattr(one, "equal", None)  # a tensor's
    return bool(equal(two) if equal else one == two)
