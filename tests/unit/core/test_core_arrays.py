"""Per-token arrays: compact, read-only however they were made, and compared by content."""

from __future__ import annotations

import array
import copy
import pickle

import numpy as np
import pytest

from polyturn.core.arrays import float_array, ids_array, same
from polyturn.core.generation import Completion, FinishReason
from polyturn.core.trajectory import Span, SpanSource
from support.refusals import refuses

SPAN = Span(ids=[1, 2], source=SpanSource.SAMPLED, turn=0, logprobs=[-0.5, -np.inf], policy_version=3, weights=[1, 0])


def test_lists_become_int32_and_float32() -> None:
    assert ids_array([1, 2]).dtype == np.int32
    assert float_array([1, 2]).dtype == np.float32
    assert ids_array([]).shape == (0,)


def test_array_of_tokens_has_one_dimension() -> None:
    refuses(lambda: ids_array([[1, 2]]), ValueError, "(1, 2)")


@pytest.mark.parametrize(
    "make",
    [lambda: np.array([1, 2], np.int32), lambda: array.array("i", [1, 2]), lambda: memoryview(array.array("i", [1, 2]))],
)
def test_writable_input_is_copied(make: object) -> None:
    mine = make()  # type: ignore[operator]
    record = ids_array(mine)
    mine[0] = 9  # the caller can still write to it
    assert record.tolist() == [1, 2]


def test_tensor_is_copied() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([-1.0, -2.0])
    record = float_array(tensor)
    tensor.zero_()
    assert record.tolist() == [-1.0, -2.0]


def test_read_only_array_is_shared() -> None:
    mine = ids_array([1, 2, 3])
    assert ids_array(mine) is mine
    assert np.shares_memory(ids_array(mine[1:]), mine)


@pytest.mark.parametrize(
    "again",
    [lambda s: s, lambda s: pickle.loads(pickle.dumps(s)), copy.copy, copy.deepcopy],
    ids=["made", "pickle", "copy", "deep"],
)
def test_arrays_of_a_record_are_read_only(again: object) -> None:
    span = again(SPAN)  # type: ignore[operator]
    assert span.same_as(SPAN)
    for values in (span.ids, span.logprobs, span.weights):
        assert not values.flags.writeable


def test_unpickling_checks_again() -> None:
    rebuild, (cls, values) = SPAN.__reduce__()
    refuses(lambda: rebuild(cls, {**values, "logprobs": [0.0]}), ValueError, "1 logprobs")


def test_same_compares_content_and_type() -> None:
    nan = float("nan")
    assert same({"a": [nan, -np.inf]}, {"a": [nan, -np.inf]})
    assert same(np.array([nan]), np.array([nan]))
    assert not same(np.array([1]), np.array([1.0]))
    assert not same(np.array([1]), [1])
    assert not same(np.array([1, 2]), np.array([1]))
    assert not same({"a": 1}, {"b": 1})
    assert not same("ab", ["a", "b"])
    assert not same([1], [1, 2])
    assert not SPAN.same_as(Span(ids=[1, 2], source=SpanSource.PROMPT))
    assert not SPAN.same_as(Completion(token_ids=[1], finish_reason=FinishReason.STOP))
