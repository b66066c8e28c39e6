"""The invariants that core alone can keep, under random episodes.

I1 the prompt the engine saw is a prefix of the training sample; I2 one length; I3 weight only on sampled tokens; I4 each
sampled token is owned by exactly one segment; I12 only table transitions; I13 pickle and JSON.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.core.arrays import same
from polyturn.core.builder import TrajectoryBuilder
from polyturn.core.errors import LifecycleError
from polyturn.core.generation import MIN_TEMPERATURE, Completion, FinishReason, GenerateRequest, SamplingParams
from polyturn.core.lifecycle import TRANSITIONS, EpisodeState, Lifecycle, StopReason
from polyturn.core.media import KINDS, Media
from polyturn.core.messages import Message, ToolCall
from polyturn.core.metrics import Max, Mean, Metric, Sum, merge, reduce
from polyturn.core.protocols import EngineCapabilities
from polyturn.core.reward import Reward
from polyturn.core.sample import SampleId, TrainSample
from polyturn.core.serde import from_json, to_json
from polyturn.core.task import InteractionRef, Task, ToolKwargs
from polyturn.core.trajectory import (
    Branch,
    Segment,
    Span,
    SpanRef,
    SpanSource,
    ToolResult,
    Trajectory,
    TrajectoryGroup,
    Turn,
)

# ---------------------------------------------------------------------------------------------------------------------
# Values

# A tiny vocabulary, so that random prompts do share prefixes with what was sampled.
ids = st.lists(st.integers(0, 3), max_size=6)
float32 = st.floats(width=32)
logprob = st.floats(max_value=0.0, width=32) | st.just(-math.inf) | st.just(math.nan)
weight = st.floats(0.0, 1.0, width=32)
name = st.text(st.characters(codec="utf-8"), max_size=6)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False) | name,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(name, inner, max_size=3),
    max_leaves=5,
)
"""What JSON itself can hold: the fields typed `Any` promise no more than that."""
info = st.dictionaries(name, plain, max_size=2)
scores = st.dictionaries(name, st.floats(), max_size=2)


def tuples(of: st.SearchStrategy[Any], max_size: int = 3) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, max_size=max_size).map(tuple)


@st.composite
def policy_versions(draw: st.DrawFn, num_tokens: int) -> tuple[tuple[int, int], ...]:
    starts = sorted({0, *draw(st.lists(st.integers(1, num_tokens - 1), max_size=2))}) if num_tokens > 1 else [0]
    return tuple((start, draw(st.integers(0, 9))) for start in starts)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    tokens = draw(ids)
    has_logprobs = draw(st.booleans())
    return Completion(
        token_ids=tokens,
        logprobs=[draw(logprob) for _ in tokens] if has_logprobs else None,
        finish_reason=draw(st.sampled_from(FinishReason)),
        policy_versions=draw(policy_versions(len(tokens))),
        info=draw(info),
    )


@st.composite
def spans(draw: st.DrawFn) -> Span:
    tokens = draw(ids)
    n = len(tokens)
    source = draw(st.sampled_from(SpanSource))
    if source is not SpanSource.SAMPLED:
        return Span(ids=tokens, source=source, turn=draw(st.integers(-1, 5)), weights=draw(st.none() | st.just([0.0] * n)))
    return Span(
        ids=tokens,
        source=source,
        turn=draw(st.integers(0, 5)),
        logprobs=draw(st.none() | st.lists(logprob, min_size=n, max_size=n)),
        policy_version=draw(st.none() | st.integers(0, 9)),
        weights=draw(st.none() | st.lists(weight, min_size=n, max_size=n)),
    )


parts = st.fixed_dictionaries({"type": st.just("text"), "text": name})
calls = st.builds(ToolCall, id=name, name=name, arguments=info, raw=name, error=st.none() | name)
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=name | tuples(parts),
    tool_calls=tuples(calls, 2),
    tool_call_id=st.none() | name,
    name=st.none() | name,
    reasoning=st.none() | st.text(min_size=1, max_size=4),
)
tasks = st.builds(
    Task,
    id=name,
    prompt=tuples(messages, 2),
    data_source=st.none() | name,
    ground_truth=plain,
    tools=st.none() | tuples(name),
    tools_kwargs=st.dictionaries(name, st.builds(ToolKwargs, create_kwargs=info, execute_kwargs=info), max_size=2),
    interaction=st.none() | st.builds(InteractionRef, name=name, kwargs=info),
    extra=info,
)
branches = st.none() | st.builds(Branch, st.integers(0, 3), st.integers(0, 9))
media = st.builds(Media, kind=st.sampled_from(KINDS), source=name | st.lists(name, max_size=2).map(tuple))
segments = st.builds(Segment, spans=tuples(spans()), media=tuples(media, 2), agent=name, parent=branches)
tool_results = st.builds(
    ToolResult,
    call_id=name,
    name=name,
    content=name | tuples(parts),
    reward=st.none() | st.floats(),
    metrics=info,
    error=st.none() | name,
    duration_s=st.floats(),
)
turns = st.builds(
    Turn,
    index=st.integers(0, 5),
    message=messages,
    finish_reason=st.sampled_from(FinishReason),
    spans=tuples(st.builds(SpanRef, st.integers(0, 3), st.integers(0, 9))),
    tool_results=tuples(tool_results, 1),
    observation=tuples(messages, 1),
    scores=scores,
    info=info,
    timings=scores,
)
rewards = st.builds(Reward, total=st.floats(), components=scores, info=info)
trajectories = st.builds(
    Trajectory,
    id=name,
    task=tasks,
    segments=tuples(segments, 2),
    turns=tuples(turns, 2),
    stop_reason=st.sampled_from(StopReason),
    reward=st.none() | rewards,
    error=st.none() | name,
    metrics=scores,
)
requests = st.builds(
    GenerateRequest,
    request_id=name,
    session_id=name,
    prompt_ids=ids,
    sampling=st.builds(
        SamplingParams,
        temperature=st.just(0.0) | st.floats(MIN_TEMPERATURE, 2),
        seed=st.none() | st.integers(0, 9),
        stop_token_ids=tuples(st.integers(0, 9)),
    ),
    media=tuples(media, 2),
    deadline=st.none() | st.floats(),
)


@st.composite
def samples(draw: st.DrawFn) -> TrainSample:
    tokens = draw(ids)
    n = len(tokens)
    floats = st.lists(logprob | float32, min_size=n, max_size=n)
    optional = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "rewards", "advantages")
    return TrainSample(
        id=draw(st.builds(SampleId, name, name, st.integers(0, 3))),
        token_ids=tokens,
        loss_weights=draw(st.lists(weight, min_size=n, max_size=n)),
        turn_ids=draw(st.lists(st.integers(-1, 3), min_size=n, max_size=n)),
        versions=draw(st.none() | st.lists(st.integers(-1, 3), min_size=n, max_size=n)),
        reward=draw(st.floats()),
        temperature=draw(st.floats(0.1, 2)),
        media=draw(tuples(media, 2)),
        **{field: draw(st.none() | floats) for field in optional},
    )


groups = st.builds(TrajectoryGroup, id=name, task=tasks, trajectories=tuples(trajectories, 1))
capabilities = st.builds(EngineCapabilities, max_context=st.none() | st.integers(1, 9))
metrics = st.builds(Mean, st.floats(), st.floats()) | st.builds(Sum, st.floats()) | st.builds(Max, st.floats())

CORE_TYPES = {
    "message": messages,
    "task": tasks,
    "request": requests,
    "completion": completions(),
    "span": spans(),
    "segment": segments,
    "turn": turns,
    "reward": rewards,
    "trajectory": trajectories,
    "group": groups,
    "sample": samples(),
    "capabilities": capabilities,
    "metric": metrics,
}


def arrays_of(value: Any) -> list[np.ndarray[Any, Any]]:
    """Every array that a record holds, at any depth."""
    if isinstance(value, np.ndarray):
        return [value]
    if dataclasses.is_dataclass(value):
        return [a for f in dataclasses.fields(value) for a in arrays_of(getattr(value, f.name))]
    if isinstance(value, tuple):
        return [a for v in value for a in arrays_of(v)]
    return []


@pytest.mark.parametrize("kind", CORE_TYPES)
@given(data=st.data())
def test_i13_core_types_pickle_and_round_trip_through_json(kind: str, data: st.DataObject) -> None:
    value = data.draw(CORE_TYPES[kind])
    again: dict[str, Callable[[Any], Any]] = {
        "pickle": lambda v: pickle.loads(pickle.dumps(v)),
        "json": lambda v: from_json(type(v), json.loads(json.dumps(to_json(v), allow_nan=False))),
    }
    for how, copy in again.items():
        back = copy(value)
        assert type(back) is type(value)
        assert same(back, value), how
        assert not any(a.flags.writeable for a in arrays_of(back)), how


# ---------------------------------------------------------------------------------------------------------------------
# The builder


@dataclasses.dataclass
class Episode:
    """A builder, and beside it the plain lists that say what must be true of it."""

    builder: TrajectoryBuilder
    sampled: list[tuple[int, int, list[int], np.ndarray[Any, Any], list[int]]] = dataclasses.field(default_factory=list)
    """Per turn: segment, first token, ids, weights, versions."""


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    """Play a random episode: completions, observations, and history edits of every kind."""
    builder = TrajectoryBuilder()
    episode = Episode(builder)
    builder.open(draw(ids))
    for turn in range(draw(st.integers(1, 6))):
        edit = draw(st.sampled_from(["none", "extend", "equal", "cut", "anything", "older"]))
        context = builder.context.tolist()
        prompt = {
            "none": None,
            "extend": context + draw(ids),
            "equal": context,
            "cut": context[: draw(st.integers(0, len(context)))] + draw(ids),
            "anything": draw(ids),
            "older": draw(st.sampled_from(builder.build())).token_ids.tolist() + draw(ids),
        }[edit]
        if prompt is not None:
            builder.set_prompt(prompt, turn=turn)
            assert builder.context.tolist() == prompt
        completion = draw(completions())
        n = len(completion.token_ids)
        weights = draw(st.none() | st.lists(weight, min_size=n, max_size=n))
        before = builder.context
        refs = builder.sample(completion, turn=turn, weights=weights)
        versions = [[v for start, v in completion.policy_versions if start <= i][-1] for i in range(n)]
        expected = np.ones(n, np.float32) if weights is None else np.array(weights, np.float32)
        episode.sampled.append((refs[0].segment, len(before), completion.token_ids.tolist(), expected, versions))
        assert len(refs) == len(completion.policy_versions)
        if draw(st.booleans()):
            builder.observe(draw(ids), turn=turn)
    return episode


@given(episodes())
def test_i3_i4_each_sampled_token_is_owned_once(episode: Episode) -> None:
    """What was sampled, and nothing else, is marked as sampled: once, where it was sampled, however often it is replayed."""
    owned = [np.zeros(len(s), np.int32) for s in episode.builder.build()]
    built = episode.builder.build()
    for index, start, tokens, weights, versions in episode.sampled:
        where = slice(start, start + len(tokens))
        assert built[index].token_ids[where].tolist() == tokens
        assert built[index].loss_weights[where].tolist() == weights.tolist()
        assert built[index].versions[where].tolist() == versions
        owned[index][where] += 1
    for segment, count in zip(built, owned, strict=True):
        assert count.tolist() == segment.sampled_mask.astype(int).tolist()
        assert not segment.loss_weights[~segment.sampled_mask].any()
        assert (segment.versions[~segment.sampled_mask] == -1).all()


@given(episodes())
def test_branch_shares_its_first_tokens_with_its_parent(episode: Episode) -> None:
    built = episode.builder.build()
    for index, segment in enumerate(built):
        if segment.parent is None:
            continue
        parent, length = segment.parent
        assert parent < index
        assert length > 0
        assert segment.token_ids[:length].tolist() == built[parent].token_ids[:length].tolist()


@given(prompts=st.lists(ids, min_size=1, max_size=5), new=ids)
def test_rewrite_extends_or_branches_the_best_segment(prompts: list[list[int]], new: list[int]) -> None:
    builder = TrajectoryBuilder()
    for prompt in prompts:
        builder.open(prompt)
    builder.set_prompt(new, turn=0)
    built = [s.token_ids.tolist() for s in builder.build()]
    continued = [p for p in prompts if new[: len(p)] == p]
    if continued:
        chosen = prompts.index(max(continued, key=len))
        assert built == [new if i == chosen else p for i, p in enumerate(prompts)]
    else:
        shared = [
            next((i for i, (a, b) in enumerate(zip(p, new, strict=False)) if a != b), min(len(p), len(new))) for p in prompts
        ]
        most = max(shared)
        assert built == [*prompts, new]
        assert builder.build()[-1].parent == (Branch(shared.index(most), most) if most else None)


# ---------------------------------------------------------------------------------------------------------------------
# Lifecycle and metrics


@given(st.lists(st.sampled_from(EpisodeState), max_size=40))
def test_i12_random_walk_makes_only_legal_moves(wanted: list[EpisodeState]) -> None:
    life = Lifecycle()
    for to in wanted:
        before, is_allowed = life.state, to in TRANSITIONS[life.state]
        if is_allowed:
            life.move(to)
            assert life.state is to
        else:
            with pytest.raises(LifecycleError):
                life.move(to)
            assert life.state is before
    assert all(b in TRANSITIONS[a] for a, b in zip(life.history, life.history[1:], strict=False))


@given(st.data())
def test_i12_live_request_can_always_fail_or_abort(data: st.DataObject) -> None:
    life = Lifecycle()
    for _ in range(data.draw(st.integers(0, 12))):
        if not TRANSITIONS[life.state]:
            break
        assert {EpisodeState.FAILED, EpisodeState.ABORTED} <= TRANSITIONS[life.state]
        life.move(data.draw(st.sampled_from(sorted(TRANSITIONS[life.state], key=lambda s: s.value))))


KINDS: dict[str, Callable[[float], Metric]] = {"mean": Mean, "sum": Sum, "max": Max}
whole = st.integers(-(10**6), 10**6).map(float)


@given(st.lists(st.dictionaries(st.sampled_from(sorted(KINDS)), whole), max_size=8), st.integers(0, 8))
def test_merging_metrics_is_associative(values: list[dict[str, float]], cut: int) -> None:
    parts = [{key: KINDS[key](v) for key, v in part.items()} for part in values]
    assert merge([merge(parts[:cut]), merge(parts[cut:])]) == merge(parts) == merge(reversed(parts))
    flat = {key: [part[key] for part in values if key in part] for key in KINDS}
    expected = {"mean": lambda v: sum(v) / len(v), "sum": sum, "max": max}
    assert reduce(merge(parts)) == pytest.approx({key: expected[key](v) for key, v in flat.items() if v})
