"""Per-token arrays: compact, read-only in every way they can come about, and compared by content."""

from __future__ import annotations

import array
import copy
import pickle

import numpy as np
import pytest

from polyturn.core.arrays import float_array, ids_array, same
from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.trajectory import Span, SpanSource

SPAN = Span(ids=[1, 2], source=SpanSource.SAMPLED, turn=0, logprobs=[-0.5, -np.inf], policy_version=3, weights=[1, 0])


def test_lists_become_int32_and_float32() -> None:
    assert ids_array([1, 2]).dtype == np.int32
    assert float_array([1, 2]).dtype == np.float32
    assert ids_array([]).shape == (0,)


def test_an_array_over_tokens_has_one_dimension() -> None:
    with pytest.raises(ValueError, match=r"one-dimensional, this one has shape \(1, 2\)"):
        ids_array([[1, 2]])


@pytest.mark.parametrize(
    "make",
    [lambda: np.array([1, 2], np.int32), lambda: array.array("i", [1, 2]), lambda: memoryview(array.array("i", [1, 2]))],
)
def test_what_the_caller_can_still_write_to_is_copied(make: object) -> None:
    mine = make()  # type: ignore[operator]
    record = ids_array(mine)
    mine[0] = 9
    assert record.tolist() == [1, 2]


def test_a_tensor_is_copied_too() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([-1.0, -2.0])
    record = float_array(tensor)
    tensor.zero_()
    assert record.tolist() == [-1.0, -2.0]


def test_the_caller_may_go_on_writing_to_what_was_copied() -> None:
    mine = np.array([1, 2], np.int32)
    ids_array(mine)
    mine[0] = 5
    assert mine[0] == 5


def test_a_read_only_array_is_not_copied() -> None:
    mine = ids_array([1, 2, 3])
    assert ids_array(mine) is mine
    assert np.shares_memory(ids_array(mine[1:]), mine)


@pytest.mark.parametrize(
    "again",
    [lambda s: s, lambda s: pickle.loads(pickle.dumps(s)), copy.copy, copy.deepcopy],
    ids=["made", "unpickled", "copied", "deep"],
)
def test_the_arrays_of_a_record_cannot_be_written_to(again: object) -> None:
    span = again(SPAN)  # type: ignore[operator]
    assert span.same_as(SPAN)
    for values in (span.ids, span.logprobs, span.weights):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 1


def test_unpickling_checks_again_what_the_constructor_checks() -> None:
    rebuild, (cls, values) = SPAN.__reduce__()
    with pytest.raises(ValueError, match="1 logprobs"):
        rebuild(cls, {**values, "logprobs": [0.0]})


def test_records_of_requests_and_completions_are_read_only_after_unpickling() -> None:
    request = GenerateRequest(request_id="r", session_id="s", prompt_ids=[1, 2])
    completion = Completion(token_ids=[1], logprobs=[-1.0], finish_reason=FinishReason.STOP)
    assert not pickle.loads(pickle.dumps(request)).prompt_ids.flags.writeable
    back = pickle.loads(pickle.dumps(completion))
    assert not back.token_ids.flags.writeable
    assert not back.logprobs.flags.writeable


def test_same_compares_by_content_and_by_type() -> None:
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
