"""Compact, read-only token arrays: int32 ids, float32 logprobs and weights.

Every core type holds such arrays. They are read-only, also after unpickling. Two records compare by value with `same_as`:
`==` on arrays does not return a bool, so the dataclasses have `eq=False`. Thousands of live episodes fit in memory, because
no token is a Python object.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ids = NDArray[np.int32]
"""[T] token ids."""
Floats = NDArray[np.float32]
"""[T] one number per token."""
Support = NDArray[np.int32]
"""[T, K] the ids that top-k and top-p kept when each token was sampled, padded with -1. A row that is all
-1 means that they removed no token, or that the token was not sampled."""

_T = TypeVar("_T")


def ids_array(values: ArrayLike) -> Ids:
    """Return `values` as a read-only int32 vector; a vector that is one already is not copied."""
    return _frozen(values, np.int32)


def float_array(values: ArrayLike) -> Floats:
    """Return `values` as a read-only float32 vector; a vector that is one already is not copied."""
    return _frozen(values, np.float32)


def support_array(values: ArrayLike) -> Support:
    """Return `values` as a read-only [T, K] array of int32."""
    array = np.asarray(values, np.int32)
    return _frozen(values if len(array) else array.reshape(0, 1), np.int32, ndim=2)


def joined_support(parts: Sequence[tuple[int, Support | None]]) -> Support | None:
    """Concatenate the supports of consecutive parts, each (number of tokens, support), to [T, K]; None if all are None."""
    width = max((known.shape[1] for _, known in parts if known is not None), default=0)
    if not width:
        return None
    whole, start = np.full((sum(count for count, _ in parts), width), -1, np.int32), 0
    for count, known in parts:
        if known is not None:
            whole[start : start + count, : known.shape[1]] = known
        start += count
    return support_array(whole)


def _frozen(values: ArrayLike, dtype: type[Any], ndim: int = 1) -> NDArray[Any]:
    array = np.asarray(values, dtype=dtype)
    if array.ndim != ndim:
        raise ValueError(f"the array has the shape {array.shape}; give one with {ndim} dimension{'s' * (ndim > 1)}")
    if array.flags.writeable:
        # Copy memory that the caller can still write to (an array, a tensor, a buffer), so that a record never changes.
        # An array that `np.asarray` has just made from a list needs no copy.
        array = array.copy() if isinstance(values, np.ndarray) or array.base is not None else array
        array.flags.writeable = False
    return array


def _rebuild(cls: type[_T], values: dict[str, Any]) -> _T:
    return cls(**values)


class Record:
    """Mixin for the frozen dataclasses that hold arrays: comparison by value, and pickling through the constructor."""

    __slots__ = ()

    def same_as(self, other: object) -> bool:
        """Return whether `other` has the same type and equal fields; NaN equals NaN, -inf equals -inf."""
        return same(self, other)

    def _freeze(self, **read: Callable[[Any], Any]) -> None:
        """Convert each named field that is not None with its function in `read`; for `__post_init__`."""
        for name, make in read.items():
            value = getattr(self, name)
            if value is not None and (frozen := make(value)) is not value:
                object.__setattr__(self, name, frozen)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return _rebuild, (type(self), values)


def same(a: object, b: object) -> bool:
    """Compare two values by content, through arrays, sequences, mappings and dataclasses."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)) or a.dtype != b.dtype:
            return False
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, Sequence) and not isinstance(a, str | bytes):
        return (
            isinstance(b, Sequence)
            and not isinstance(b, str | bytes)
            and len(a) == len(b)
            and all(same(x, y) for x, y in zip(a, b, strict=True))
        )
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)
    return a == b
