"""TrajectoryBuilder: appends tokens, splits by policy version, branches on an edit, and copies nothing old.

`tests/property/test_core_invariants.py` checks where branches begin and which segment grows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polyturn.core.builder import TrajectoryBuilder
from polyturn.core.errors import AlignmentError
from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.trajectory import Branch, SpanRef, SpanSource
from support.refusals import refuses


def completion(ids: list[int], **more: Any) -> Completion:
    return Completion(token_ids=ids, logprobs=[-float(i) for i in ids], finish_reason=FinishReason.STOP, **more)


def two_turns() -> TrajectoryBuilder:
    """One segment: prompt 1 2 3, turn 0 sampled 4 5, observed 6, turn 1 sampled 7."""
    builder = TrajectoryBuilder()
    builder.open([1, 2, 3])
    builder.sample(completion([4, 5]), turn=0)
    builder.observe([6], turn=0)
    builder.sample(completion([7]), turn=1)
    return builder


def test_conversation_without_edits_is_one_segment() -> None:
    (segment,) = two_turns().build()
    assert segment.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert segment.loss_weights.tolist() == [0, 0, 0, 1, 1, 0, 1]
    assert segment.logprobs.tolist() == [0, 0, 0, -4, -5, 0, -7]
    assert segment.turn_ids.tolist() == [-1, -1, -1, 0, 0, 0, 1]
    assert segment.parent is None


def test_references_lead_to_their_spans() -> None:
    builder = TrajectoryBuilder()
    assert builder.open([1]) == SpanRef(0, 0)
    assert builder.sample(completion([2]), turn=0) == (SpanRef(0, 1),)
    assert builder.observe([3], turn=0) == SpanRef(0, 2)
    assert builder.set_prompt([9], turn=1) == SpanRef(1, 0)
    assert builder.span(SpanRef(0, 1)).ids.tolist() == [2]


def test_weights_of_another_length_append_nothing() -> None:
    builder = TrajectoryBuilder()
    builder.open([1])
    refuses(lambda: builder.sample(completion([2, 3]), turn=0, weights=[1]), AlignmentError, "1 weights for 2")
    assert builder.context.tolist() == [1]


def test_weights_can_be_set_later_over_all_spans() -> None:
    builder = TrajectoryBuilder()
    builder.open([1])
    refs = builder.sample(completion([2, 3, 4], policy_versions=((0, 1), (2, 2))), turn=0)
    builder.reweigh(refs, [1, 0, 0.5])
    assert builder.build()[0].loss_weights.tolist() == [0, 1, 0, 0.5]
    refuses(lambda: builder.reweigh(refs, [1, 1]), AlignmentError, "2 weights for 3")
    for odd in (float("nan"), float("inf")):
        with pytest.raises(AlignmentError, match=f"{odd}"):
            builder.reweigh(refs, [1, odd, 1])
    assert builder.build()[0].loss_weights.tolist() == [0, 1, 0, 0.5]


def test_only_sampled_spans_can_be_reweighed() -> None:
    builder = two_turns()
    refuses(lambda: builder.reweigh([SpanRef(0, 1), SpanRef(0, 2)], [0, 0, 0]), AlignmentError, "observation span")
    assert builder.build()[0].loss_weights.tolist() == [0, 0, 0, 1, 1, 0, 1]


def test_builder_needs_a_prompt_first() -> None:
    with pytest.raises(AlignmentError, match="`open`"):
        _ = TrajectoryBuilder().context
    refuses(lambda: TrajectoryBuilder().observe([1], turn=0), AlignmentError, "`open`")


def test_continued_prompt_adds_only_new_tokens() -> None:
    builder = two_turns()
    ref = builder.set_prompt([1, 2, 3, 4, 5, 6, 7, 8, 9], turn=1)
    assert ref == SpanRef(0, 4)
    assert builder.span(ref).source is SpanSource.OBSERVATION
    assert builder.span(ref).ids.tolist() == [8, 9]
    assert builder.set_prompt([1, 2, 3, 4, 5, 6, 7, 8, 9], turn=1) is None
    (segment,) = builder.build()
    assert len(segment.spans) == 5


def test_segment_of_another_agent_is_left_alone() -> None:
    builder = TrajectoryBuilder(agent="critic")
    builder.open([1, 2, 3])
    builder.agent = "solver"
    builder.set_prompt([1, 2, 3, 4], turn=0)
    critic, solver = builder.build()
    assert critic.token_ids.tolist() == [1, 2, 3]
    assert (solver.agent, solver.parent) == ("solver", None)


def test_agent_branches_at_the_earlier_position_of_its_fork() -> None:
    builder = TrajectoryBuilder()
    builder.open([1, 2])
    earlier = builder.place
    builder.observe([3], turn=0)
    for at, parent in ((earlier, Branch(0, 2)), (None, Branch(0, 3))):
        judge = builder.fork(agent=f"judge of {parent.length}", at=at)
        judge.set_prompt([1, 2, 3, 4], turn=1)
        assert judge.build()[-1].parent == parent


def test_fork_for_another_agent_needs_a_prompt() -> None:
    builder = TrajectoryBuilder()
    builder.open([1, 2])
    judge = builder.fork(agent="judge")
    for use in (lambda: judge.context, lambda: judge.observe([3], turn=0), judge.fork, lambda: judge.add_media("a.png")):
        refuses(use, AlignmentError, "no segment yet")
    (segment,) = builder.build()
    assert segment.token_ids.tolist() == [1, 2], "the other agent's segment is left alone"


def test_media_belong_to_the_growing_segment() -> None:
    builder = TrajectoryBuilder()
    builder.open([1])
    builder.add_media("a.png")
    builder.set_prompt([2], turn=0)
    builder.add_media("b.png", "c.png")
    assert [s.media for s in builder.build()] == [("a.png",), ("b.png", "c.png")]


def test_context_and_request_share_the_builders_memory() -> None:
    builder = TrajectoryBuilder()
    builder.open([1, 2, 3])
    first = builder.context
    builder.sample(completion([4]), turn=0)
    request = GenerateRequest(request_id="r", session_id="s", prompt_ids=builder.context)
    assert np.shares_memory(request.prompt_ids, first)
    assert not request.prompt_ids.flags.writeable


def test_held_context_is_unchanged_when_the_buffer_grows() -> None:
    builder = TrajectoryBuilder()
    builder.open([1, 2, 3])
    held = builder.context
    for turn in range(20):
        builder.observe(range(100), turn=turn)
    assert not np.shares_memory(held, builder.context)
    assert held.tolist() == [1, 2, 3]
    assert builder.context[:3].tolist() == [1, 2, 3]
    assert len(builder.context) == 2003


def test_turn_costs_only_its_new_tokens() -> None:
    """The buffer doubles: 4096 turns of one token move it a handful of times, not 4096 times."""
    builder = TrajectoryBuilder()
    builder.open([0])
    moves, last = 0, builder.context
    for turn in range(4096):
        builder.observe([turn], turn=turn)
        now = builder.context
        moves += not np.shares_memory(now, last)
        last = now
    assert moves <= 5


def test_few_new_tokens_do_not_keep_a_full_render_alive() -> None:
    builder = TrajectoryBuilder()
    builder.open(range(1000))
    ref = builder.set_prompt([*range(1000), 7], turn=0)
    assert ref is not None
    ids = builder.span(ref).ids
    assert ids.base is None or ids.base.size < 10
