"""Requests and completions: impossible sampling and misaligned answers are refused at once."""

from __future__ import annotations

from typing import Any

import pytest

from polyturn.core.errors import AlignmentError, ConfigError
from polyturn.core.generation import Completion, FinishReason, SamplingParams
from support.refusals import refuses


@pytest.mark.parametrize(
    "bad",
    [
        *({"max_tokens": v} for v in (0, 1.0, float("nan"))),
        *({"temperature": v} for v in (-0.1, 1e-45, 1e-320, 1e39, float("nan"), float("inf"))),
        *({"top_p": v} for v in (0.0, 1.1, float("nan"))),
        *({"top_k": v} for v in (-2, 1.5, 2**63, float("nan"))),
    ],
)
def test_impossible_sampling_names_field_and_value(bad: dict[str, Any]) -> None:
    ((name, value),) = bad.items()
    refuses(lambda: SamplingParams(**bad), ConfigError, f"{name} is {value}")
    assert SamplingParams(temperature=0).temperature == 0


def test_completion_needs_one_logprob_a_token() -> None:
    with pytest.raises(AlignmentError, match=r"2 tokens .* 1 logprobs"):
        Completion(token_ids=[1, 2], logprobs=[-1.0], finish_reason=FinishReason.STOP)


def test_finish_reason_may_be_a_name() -> None:
    assert Completion(token_ids=[1], finish_reason="length").finish_reason is FinishReason.LENGTH  # type: ignore[arg-type]
    refuses(lambda: Completion(token_ids=[1], finish_reason="done"), ValueError, "'done'")  # type: ignore[arg-type]


@pytest.mark.parametrize("runs", [(), ((1, 0),), ((0, 1), (0, 2)), ((0, 1), (5, 2), (3, 3))])
def test_policy_versions_rise_from_token_zero(runs: tuple[tuple[int, int], ...]) -> None:
    refuses(
        lambda: Completion(token_ids=[1] * 8, finish_reason=FinishReason.STOP, policy_versions=runs),
        AlignmentError,
        "token 0",
    )
