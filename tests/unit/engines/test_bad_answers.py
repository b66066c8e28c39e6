"""A server's answer is checked where it arrives: what cannot be right is an error of its request."""

from typing import Any

import pytest

from polyturn.engines.request_limits import read_ids, read_logprobs
from support.refusals import refuses


@pytest.mark.parametrize(
    "values", [[100], [-1], [5.5], [2**40], [2**80], [None], ["7"], [True], [[1, 2]], [1] * 5, 7], ids=repr
)
def test_ids_that_cannot_be_right_are_refused(values: Any) -> None:
    refuses(lambda: read_ids(values, vocab_size=100, max_tokens=4), ValueError, "token")


@pytest.mark.parametrize("values", [[None], [0.5], [float("nan")], [float("inf")], ["-1"], [[-1.0]], [-0.1, None]], ids=repr)
def test_logprobs_that_cannot_be_right_are_refused(values: Any) -> None:
    refuses(lambda: read_logprobs(values), ValueError, "log-probabilit")


def test_right_answers_are_read_as_they_are() -> None:
    ids = read_ids([0, 99], vocab_size=100, max_tokens=4)
    assert (ids.tolist(), ids.dtype) == ([0, 99], "int32")
    assert read_ids(None, vocab_size=100, max_tokens=4).tolist() == []
    assert read_logprobs([-1.5, 0, -9999.0]).tolist() == [-1.5, 0.0, -9999.0]
    assert read_logprobs([]).dtype == "float32"
