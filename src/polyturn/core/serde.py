"""Converts the core types to and from JSON, by their annotations.

    to_json(span)            ->  {"ids": [5, 6], "source": "sampled", "logprobs": [-0.5, "-inf"], ...}
    routes of 2 tokens       ->  {"dtype": "uint8", "shape": [2, 48, 8], "data": base64 of its bytes}
    from_json(Span, data)    ->  Span(...)

Arrays become lists. Numbers that JSON cannot write become the strings "inf", "-inf" and "nan", so that a log-probability of
-inf survives. Plug-ins and models choose the type of some values: a value that JSON cannot hold, or that is nested too
deeply for readers, becomes a text instead of an error.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeVar, Union, get_args, get_origin

import numpy as np

from polyturn.core.errors import PLUGIN_RAISES, one_line

_T = TypeVar("_T")


def to_json(value: Any, depth: int = 0) -> Any:
    """Convert `value`, which is nested `depth` levels deep, to plain JSON data (dict, list, str, int, float, bool, None)."""
    kind: Any = type(value)
    return value if kind in _PLAIN else _writer(kind)(value, depth)


def from_json(cls: type[_T], data: Any) -> _T:
    """Build a `cls` from `data`, the output of `to_json`; parts of `data` that are records already stay unchanged.

    Raises:
        TypeError: `data` has a field that `cls` lacks, or lacks one without a default.
    """
    result: _T = _decode(cls, data)
    return result


_PLAIN = frozenset({str, bool, type(None)})
_MAX_DEPTH = 128
"""The deepest nesting that is written. Records have about ten levels, data from files and the network at most
`nesting.MAX_DEPTH`."""
_MAX_INT = 10**4000
"""The bound on integers: Python does not convert integers of more than 4,300 digits to or from text."""


@functools.cache
def _writer(kind: type[Any]) -> Callable[[Any, int], Any]:
    """Return the function that writes values of this type; cached, because a step writes many values."""
    if issubclass(kind, Enum):
        return lambda value, _: value.value
    if dataclasses.is_dataclass(kind):
        names = tuple(f.name for f in dataclasses.fields(kind))
        return lambda value, depth: {name: to_json(getattr(value, name), depth + 1) for name in names}
    if issubclass(kind, np.ndarray):
        return _write_array
    if issubclass(kind, np.generic):
        return lambda value, _: _number(value.item())
    if issubclass(kind, Mapping):
        return _bounded(lambda value, depth: {str(k): to_json(v, depth + 1) for k, v in value.items()})
    if issubclass(kind, list | tuple | set | frozenset):
        return _bounded(lambda value, depth: [to_json(v, depth + 1) for v in value])
    if issubclass(kind, str | bool):
        return lambda value, _: value
    return (lambda value, _: _number(value)) if issubclass(kind, int | float) else (lambda value, _: _as_text(value))


def _bounded(write: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    def written(value: Any, depth: int) -> Any:
        return (
            write(value, depth) if depth < _MAX_DEPTH else f"a {type(value).__name__}, {depth} levels deep, not written out"
        )

    return written


def _as_text(value: Any) -> str:
    try:
        return repr(value)
    except PLUGIN_RAISES as problem:  # an author's class may raise anything
        return f"a {type(value).__name__}, which cannot be written out: {one_line(problem)}"


def _write_array(array: np.ndarray[Any, Any], depth: int) -> Any:
    if array.ndim == 3 and array.dtype.kind == "u":
        data = base64.b64encode(array.tobytes()).decode("ascii")
        return {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}
    if array.dtype.kind in "iub" or (array.dtype.kind == "f" and np.isfinite(array).all()):
        return array.tolist()
    return to_json(array.tolist(), depth)


def _number(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and not -_MAX_INT < value < _MAX_INT:
        return f"a whole number of {value.bit_length()} bits"
    return value


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode(hint: Any, data: Any) -> Any:
    return None if data is None else _reader(hint)(data)


@functools.cache
def _reader(hint: Any) -> Callable[[Any], Any]:
    """Return the function that reads values of this annotation; cached, like `_writer`."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        options = [a for a in get_args(hint) if a is not type(None)]
        if all(get_origin(a) is np.ndarray for a in options):  # the data of such arrays names its dtype
            options = options[:1]
        return _reader(options[0]) if len(options) == 1 else lambda data: _decode(_pick(options, data), data)
    if origin is np.ndarray:
        dtype = np.dtype(get_args(get_args(hint)[1])[0])
        return lambda data: data if isinstance(data, np.ndarray) else read_array(data, dtype)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        readers = {name: _reader(of) for name, of in _hints(hint).items()}
        as_it_is = {name for name, reader in readers.items() if reader is _unchanged}

        def read(data: Any) -> Any:
            if isinstance(data, hint):
                return data
            values = {k: v if v is None or k in as_it_is or k not in readers else readers[k](v) for k, v in data.items()}
            return hint(**values)

        return read
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    if origin is tuple or (isinstance(hint, type) and issubclass(hint, tuple)):
        return _tuple_reader(hint)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        _, of = get_args(hint)
        reader = _reader(of)
        return dict if reader is _unchanged else lambda data: {k: None if v is None else reader(v) for k, v in data.items()}
    return float if hint is float else _unchanged


def _unchanged(data: Any) -> Any:
    return data


def read_array(data: Any, dtype: Any) -> Any:
    """Read the array that `to_json` wrote as `data`; `dtype` applies if `data` is a list of numbers."""
    if isinstance(data, Mapping):
        return np.frombuffer(base64.b64decode(data["data"]), data["dtype"]).reshape(data["shape"])
    return np.array([float(v) if isinstance(v, str) else v for v in data], dtype=dtype)


def _tuple_reader(hint: Any) -> Callable[[Any], Any]:
    if hasattr(hint, "_fields"):
        of = tuple(_hints(hint).values())
        return lambda data: hint(*(_decode(t, v) for t, v in zip(of, data, strict=True)))
    args = get_args(hint)
    if len(args) == 2 and args[1] is Ellipsis:
        reader = _reader(args[0])
        return tuple if reader is _unchanged else lambda data: tuple([None if v is None else reader(v) for v in data])
    return lambda data: tuple(_decode(t, v) for t, v in zip(args, data, strict=True)) if args else tuple(data)


def _pick(options: list[Any], data: Any) -> Any:
    """Choose the member of a union, such as str | tuple[...], that fits the JSON value."""
    for option in options:
        kind = get_origin(option) or option
        if isinstance(data, str) and kind is str:
            return option
        if isinstance(data, list) and isinstance(kind, type) and issubclass(kind, tuple | list | np.ndarray):
            return option
        if isinstance(data, dict) and (dataclasses.is_dataclass(kind) or kind in (dict, Mapping)):
            return option
    return options[0]
