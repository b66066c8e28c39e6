"""JSON of the core types: values that JSON cannot write survive, and wrong fields are refused."""

from __future__ import annotations

import json
import math
from enum import Enum
from typing import Any

import numpy as np

from polyturn.core.generation import FinishReason
from polyturn.core.messages import Message
from polyturn.core.serde import from_json, to_json
from polyturn.core.trajectory import Span, SpanSource
from support.refusals import refuses


class Colour(Enum):
    RED = "red"


def test_infinity_and_nan_survive_as_words() -> None:
    span = Span(ids=[1, 2, 3], source=SpanSource.SAMPLED, logprobs=[-np.inf, np.nan, -0.1])
    text = json.dumps(to_json(span), allow_nan=False)
    assert json.loads(text)["logprobs"][:2] == ["-inf", "nan"]
    assert from_json(Span, json.loads(text)).same_as(span)


def test_value_nested_too_deeply_is_described() -> None:
    value: Any = "leaf"
    for _ in range(128):
        value = [value]
    assert to_json(value) == value
    told = to_json([value])
    for _ in range(128):
        (told,) = told
    assert told == "a list, 128 levels deep, not written out"


def test_loose_values_become_plain_data() -> None:
    value = {
        1: np.float32(0.5),
        "nan": math.nan,
        "enum": Colour.RED,
        "matrix": np.array([[1.0, np.inf]]),
        "scalar": np.array(3),
        "set": {7},
        "object": FinishReason,
    }
    plain = to_json(value)
    assert plain["1"] == 0.5
    assert plain["nan"] == "nan"
    assert plain["enum"] == "red"
    assert plain["matrix"] == [[1.0, "inf"]]
    assert plain["scalar"] == 3
    assert plain["set"] == [7]
    assert isinstance(plain["object"], str)
    assert json.dumps(plain, allow_nan=False)


def test_missing_and_unknown_fields_are_refused() -> None:
    refuses(lambda: from_json(Message, {"role": "user", "colour": "red"}), TypeError, "colour")
    refuses(lambda: from_json(Message, {"content": "x"}), TypeError, "role")
