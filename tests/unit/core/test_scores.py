"""A reward is a finite number that a loss can hold; a verdict of a judge is read or refused."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from polyturn.core.errors import RewardError
from polyturn.core.reward import MAX_REWARD, as_flag, as_score
from polyturn.partners.judge import read_verdict
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task
from polyturn.tools.result_shape import finite
from support.parts import Says
from support.refusals import refuses


class Two:
    """As a tensor of two numbers."""

    def __float__(self) -> float:
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")


class Ends(BaseException):
    """An error that `except Exception` does not catch."""


class Escapes:
    def __float__(self) -> float:
        raise Ends


NO_SCORES: list[Any] = [
    Two(),
    Escapes(),
    1e16,
    -math.inf,
    math.nan,
    10**5000,
    "1",
    None,
    [],
    np.float32("inf"),
]


@pytest.mark.parametrize("value", NO_SCORES, ids=[type(v).__name__ + str(i) for i, v in enumerate(NO_SCORES)])
def test_value_that_no_loss_can_hold_is_not_a_reward(value: Any) -> None:
    assert as_score(value) is None
    refuses(lambda: finite(value, what="outcome"), RewardError, "outcome")


@pytest.mark.parametrize("value", [0, -1, True, 0.5, np.float32(2.0), MAX_REWARD, -MAX_REWARD])
def test_number_is_a_reward(value: Any) -> None:
    assert as_score(value) == float(value)
    assert np.isfinite(np.square(np.float32(value)) * 1e6)


@pytest.mark.parametrize(
    ("value", "flag"),
    [
        *((v, True) for v in (True, 1, 1.0, np.bool_(True), np.array(1), re.match("a", "a"))),
        *((v, False) for v in (False, None, 0, np.bool_(False), np.array([0.0]))),
        *((v, None) for v in ("false", "", b"", "no", math.nan, {}, {"a": 1}, [], (True,), np.array([0, 1]))),
    ],
)
def test_flag_is_neither_text_nor_a_collection(value: Any, flag: bool | None) -> None:
    assert as_flag(value) is flag


async def test_interaction_that_swaps_its_answer_fails() -> None:
    swapped = Says()
    swapped.answer = ("Try again.", False, 0.0, {})  # type: ignore[assignment]
    context = scripted_context(["#### 4"], interactions={"user": swapped})
    trajectory = await run_episode(context, task(interaction="user"), id="e")
    assert "'Try again.' for should_terminate" in str(trajectory.error)


@pytest.mark.parametrize(
    "answer",
    [
        "", "x", "[]", '"0.5"', "NaN", "1e400", "9" * 5000, "-1", "[" * 100_000, '{"score":' * 50_000, "{}",
        '{"score": null}', '{"score": true}', '{"score": 1e308}', "\ud800", "```json\n[[\n```", '{"score": 2}',
    ],
    ids=range(17),
)  # fmt: skip
def test_verdict_that_is_not_a_score_is_a_value_error(answer: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_verdict(answer, low=0.0, high=1.0)
    assert len(str(caught.value)) < 400


def test_reason_of_another_type_is_kept_as_text() -> None:
    assert read_verdict('{"score": 1, "reason": {"a": [1]}}', low=0.0, high=1.0) == (1.0, "{'a': [1]}")
    score, reason = read_verdict('{"score": 1, "reason": ' + "[" * 900 + "]" * 900 + "}", low=0.0, high=1.0)
    assert score == 1.0 and isinstance(reason, str)
