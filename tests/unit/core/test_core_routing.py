"""Routes of experts stay with their tokens: over turns, forks, edits, cuts, parts of a completion, pickle and JSON."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polyturn.core.builder import TrajectoryBuilder
from polyturn.core.continuation import continued, joined
from polyturn.core.errors import AlignmentError
from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.routing import RouteShape, fill, has_route
from polyturn.core.serde import from_json, to_json
from polyturn.core.trajectory import Span, SpanSource
from support.refusals import refuses

SHAPE = RouteShape(num_layers=2, top_k=2, num_experts=8)


def routes_of(ids: Any) -> Any:
    """Return [T, 2, 2] the routes that a model would choose: a token's follow from all tokens up to it."""
    sums = np.cumsum(np.asarray(ids, np.int64) + 1)
    return SHAPE.read(np.stack([(sums * factor) % 8 for factor in (1, 3, 5, 7)], axis=1).reshape(-1, 2, 2))


def answer(prompt: Any, ids: list[int], *, routed_from: int = 0, **more: Any) -> Completion:
    """Return the answer of an engine that knows the routes of all but the last token."""
    whole = [*np.asarray(prompt).tolist(), *ids]
    return Completion(
        token_ids=ids,
        logprobs=np.zeros(len(ids)),
        finish_reason=FinishReason.STOP,
        routed_experts=routes_of(whole)[routed_from : len(whole) - 1],
        **more,
    )


def check(builder: TrajectoryBuilder) -> None:
    """Check that each known route is that of its token in its context."""
    for segment in builder.build():
        if segment.routed_experts is not None:
            known = has_route(segment.routed_experts)
            assert np.array_equal(segment.routed_experts[known], routes_of(segment.token_ids)[known])


def test_turn_brings_the_routes_of_all_but_its_last_token() -> None:
    builder = TrajectoryBuilder()
    builder.open([1, 2, 3])
    assert builder.num_routed == 0
    builder.sample(answer([1, 2, 3], [4, 5], policy_versions=((0, 1), (1, 2))), turn=0)
    (segment,) = builder.build()
    assert [None if s.routed_experts is None else has_route(s.routed_experts).tolist() for s in segment.spans] == [
        [True] * 3,
        [True],
        None,
    ]
    builder.observe([6], turn=0)
    assert builder.num_routed == 4
    builder.sample(answer(builder.context, [7, 8], routed_from=4), turn=1)
    (segment,) = builder.build()
    assert has_route(segment.routed_experts).tolist() == [True] * 7 + [False]
    check(builder)


@given(st.lists(st.tuples(st.sampled_from(["turn", "fork", "edit", "cut"]), st.integers(0, 7)), max_size=12))
def test_known_route_is_that_of_its_context(steps: list[tuple[str, int]]) -> None:
    builder = TrajectoryBuilder()
    builder.open([1, 2])
    places = [builder]
    for number, (what, value) in enumerate(steps):
        place = places[value % len(places)]
        if what == "turn":
            ids = [value + 1] * (1 + value % 3)
            made = answer(place.context, ids, routed_from=place.num_routed)
            refs = place.sample(made, turn=number)
            if value % 2:
                place.observe([value], turn=number)
            elif value % 3 == 0:
                place.cut(refs, keep=len(ids) - 1)
        elif what == "fork":
            places.append(place.fork())
        elif what == "edit":
            place.set_prompt([*place.context[: 1 + value].tolist(), 9, value], turn=number)
        check(builder)


def test_fork_asks_only_for_routes_that_it_does_not_share() -> None:
    builder = TrajectoryBuilder()
    builder.open([1, 2])
    builder.sample(answer([1, 2], [3, 4]), turn=0)
    other = builder.fork()
    builder.observe([5], turn=0)
    other.observe([6], turn=0)
    assert other.num_routed == builder.num_routed == 3


def test_completion_in_parts_has_the_routes_of_all() -> None:
    request = GenerateRequest(request_id="a", session_id="a", prompt_ids=[1, 2], routed_from=1)
    first = answer([1, 2], [3, 4], routed_from=1)
    rest = continued(request, [first])
    assert rest.routed_from == 3
    whole = joined([first, answer(rest.prompt_ids, [5], routed_from=3)])
    assert np.array_equal(whole.routed_experts, routes_of([1, 2, 3, 4, 5])[1:4])
    assert np.array_equal(whole.head(1, FinishReason.STOP).routed_experts, routes_of([1, 2])[1:])


def test_routes_survive_pickle_and_json_read_only() -> None:
    span = Span(ids=[1, 2], source=SpanSource.PROMPT, routed_experts=routes_of([1, 2]))
    assert not span.routed_experts.flags.writeable
    for back in (pickle.loads(pickle.dumps(span)), from_json(Span, json.loads(json.dumps(to_json(span))))):
        assert back.same_as(span)
        assert not back.routed_experts.flags.writeable
    wide = RouteShape(num_layers=1, top_k=1, num_experts=256)
    assert wide.dtype is np.uint16, "with 256 experts, uint8 has no number left for an unknown route"
    span = Span(ids=[1], source=SpanSource.PROMPT, routed_experts=wide.read([[[255]]]))
    assert from_json(Span, json.loads(json.dumps(to_json(span)))).same_as(span)


def test_token_keeps_the_route_that_it_has() -> None:
    held = fill(None, 3, routes_of([1, 2])[:2], at=0)
    assert np.array_equal(fill(held, 3, routes_of([7, 7, 7]), at=0)[:2], held[:2])


def test_routes_of_another_model_are_refused_in_a_sentence() -> None:
    refuses(lambda: SHAPE.read(np.zeros((4, 3, 2), np.uint8)), AlignmentError, "2 layers with experts")
    refuses(lambda: SHAPE.read(np.full((4, 2, 2), 8, np.uint8)), AlignmentError, "expert 8, and this model has 8")
    refuses(lambda: SHAPE.read(np.full((4, 2, 2), -1)), AlignmentError, "expert -1, and this model has 8")
    refuses(lambda: SHAPE.read([[[0, 7], [-2, 1]]]), AlignmentError, "expert -2, and this model has 8")
    refuses(
        lambda: SHAPE.read(np.full((4, 2, 2), 0.5)),
        AlignmentError,
        "routes of type float64, and an expert is a whole number",
    )
    refuses(
        lambda: Span(ids=[1], source=SpanSource.PROMPT, routed_experts=np.zeros((1, 2, 2))),
        AlignmentError,
        "uint8 or uint16",
    )
    refuses(
        lambda: Span(ids=[1, 2], source=SpanSource.PROMPT, routed_experts=routes_of([1])),
        AlignmentError,
        "give one entry",
    )
    builder = TrajectoryBuilder()
    builder.open([1])
    refuses(lambda: builder.sample(answer([1, 2, 3], [4]), turn=0), AlignmentError, "the engine returned routes of")
