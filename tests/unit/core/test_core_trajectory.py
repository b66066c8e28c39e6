"""Spans, segments, turns, trajectories: arrays are derived, of one length, and only sampled tokens have weight."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polyturn.core.errors import AlignmentError
from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.task import Task
from polyturn.core.trajectory import Branch, Segment, Span, SpanRef, SpanSource, Trajectory, Turn

PROMPT = Span(ids=[1, 2, 3], source=SpanSource.PROMPT)
SAMPLED = Span(ids=[4, 5], source=SpanSource.SAMPLED, turn=0, logprobs=[-0.5, -1.5], policy_version=7)
OBSERVED = Span(ids=[6], source=SpanSource.OBSERVATION, turn=0)
LAST = Span(ids=[7, 8], source=SpanSource.SAMPLED, turn=1, policy_version=8, weights=[0.5, 0.0])
SEGMENT = Segment(spans=(PROMPT, SAMPLED, OBSERVED, LAST))


def test_arrays_of_a_segment_come_from_its_spans() -> None:
    assert len(SEGMENT) == 8
    assert SEGMENT.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert SEGMENT.loss_weights.tolist() == [0, 0, 0, 1, 1, 0, 0.5, 0]
    assert SEGMENT.logprobs.tolist() == [0, 0, 0, -0.5, -1.5, 0, 0, 0]
    assert SEGMENT.turn_ids.tolist() == [-1, -1, -1, 0, 0, 0, 1, 1]
    assert SEGMENT.versions.tolist() == [-1, -1, -1, 7, 7, -1, 8, 8]
    assert SEGMENT.sampled_mask.tolist() == [False] * 3 + [True] * 2 + [False] + [True] * 2


@pytest.mark.parametrize("source", [SpanSource.PROMPT, SpanSource.OBSERVATION])
@pytest.mark.parametrize(
    ("field", "key"),
    [
        ({"weights": [0.0, 1.0]}, "weight"),
        ({"weights": [0.0, np.nan]}, "weight"),
        ({"logprobs": [-1.0, -1.0]}, "logprobs"),
        ({"policy_version": 3}, "policy version 3"),
    ],
)
def test_only_sampled_tokens_are_trained(source: SpanSource, field: dict[str, Any], key: str) -> None:
    with pytest.raises(AlignmentError, match=f"{source.value} span .*{key}"):
        Span(ids=[1, 2], source=source, **field)
    assert Span(ids=[1], source=source, weights=[0.0]).loss_weights.tolist() == [0.0]


@pytest.mark.parametrize("field", ["logprobs", "weights"])
def test_arrays_of_another_length_are_refused(field: str) -> None:
    with pytest.raises(AlignmentError, match=f"2 ids has 3 {field}"):
        Span(ids=[1, 2], source=SpanSource.SAMPLED, **{field: [0.0, 0.0, 0.0]})  # type: ignore[arg-type]


def test_turn_sums_its_scores_and_none_is_not_zero() -> None:
    turn = Turn(
        index=0,
        message=Message(role="assistant"),
        finish_reason=FinishReason.STOP,
        scores={"interaction": 1, "tool/f": -0.25},
    )
    assert turn.score == 0.75
    assert Turn(index=0, message=Message(role="assistant"), finish_reason=FinishReason.STOP).score is None


def trajectory(stop_reason: StopReason = StopReason.STOP) -> Trajectory:
    answer, reply = Message(role="assistant", content="4"), Message(role="user", content="no")
    turns = (
        Turn(
            index=0,
            message=answer,
            finish_reason=FinishReason.STOP,
            observation=(reply,),
            spans=(SpanRef(0, 1), SpanRef(0, 2)),
        ),
        Turn(index=1, message=answer, finish_reason=FinishReason.STOP, spans=(SpanRef(0, 3),), scores={"interaction": 1.0}),
    )
    task = Task(id="t", prompt=(Message(role="user", content="2+2?"),))
    branch = Segment(spans=(Span(ids=[1, 2, 9], source=SpanSource.PROMPT),), parent=Branch(0, 2))
    return Trajectory(id="t/0", task=task, segments=(SEGMENT, branch), turns=turns, stop_reason=stop_reason)


def test_trajectory_has_messages_scores_and_tokens() -> None:
    record = trajectory()
    assert [m.role for m in record.messages] == ["user", "assistant", "user", "assistant"]
    assert record.turn_scores == (None, 1.0)
    assert record.num_sampled_tokens == 4
    assert [record.span(ref).source for ref in record.turns[0].spans] == [SpanSource.SAMPLED, SpanSource.OBSERVATION]
    assert record.span(record.turns[1].spans[0]) is LAST
    assert not record.is_failed
    assert trajectory(StopReason.ABORTED).is_failed
