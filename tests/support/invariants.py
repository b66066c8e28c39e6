"""I1 to I4 of the tokens of a trajectory, checked in one place.

I1  the engine was shown exactly the tokens that stand before the tokens that it sampled
I2  the arrays of a segment, and of a sample, have one length
I3  only sampled tokens have a loss weight
I4  each sampled token is in exactly one sample, with the logprob that the engine gave it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from polyturn.batching.samples import to_samples
from polyturn.core.arrays import Ids
from polyturn.core.generation import Completion
from polyturn.core.trajectory import Segment, SpanSource, Trajectory, TrajectoryGroup

Exchange = tuple[Ids, Completion]
"""The prompt that the engine was shown, and its answer."""


def check_invariants(t: Trajectory, exchanges: Iterable[Exchange] | None = None, *, is_all_trained: bool = True) -> None:
    """Check I2 to I4, and I1 where the exchanges of its turns are given.

    Args:
        t: The trajectory.
        exchanges: What the engine was shown and answered, for each of its turns, in any order.
        is_all_trained: Whether every sampled token has a loss weight; False where a scheduler masked some.
    """
    if exchanges is not None:
        check_exchanges(t, exchanges)
    check_segments(t, is_all_trained=is_all_trained)
    check_samples(t)


def check_exchanges(t: Trajectory, exchanges: Iterable[Exchange]) -> None:
    """I1: the turns hold the prompts, ids and logprobs of these exchanges, each once."""
    expected = Counter(_key(prompt, done.token_ids, done.logprobs) for prompt, done in exchanges)
    held: Counter[tuple[bytes, ...]] = Counter()
    for index, segment, start, end in sampled_turns(t):
        held[_key(segment.token_ids[:start], segment.token_ids[start:end], segment.logprobs[start:end])] += 1
        assert set(segment.turn_ids[start:end].tolist()) <= {index}
    assert held == expected, f"I1: {t.id} does not hold what the engine was shown and sampled"


def sampled_turns(t: Trajectory) -> Iterable[tuple[int, Segment, int, int]]:
    """Yield (turn, its segment, where its sampled tokens start, where they end)."""
    for turn in t.turns:
        refs = [ref for ref in turn.spans if t.span(ref).source is SpanSource.SAMPLED]
        segment = t.segments[refs[0].segment]
        start = sum(len(span) for span in segment.spans[: refs[0].span])
        yield turn.index, segment, start, start + sum(len(t.span(ref)) for ref in refs)


def check_segments(t: Trajectory, *, is_all_trained: bool = True) -> None:
    """I2 and I3, spans of one turn each, and segments that begin with what they share with their parent."""
    for segment in t.segments:
        arrays = (segment.loss_weights, segment.logprobs, segment.turn_ids, segment.versions)
        assert {len(array) for array in arrays} == {len(segment.token_ids)}, "I2"
        weighed = segment.loss_weights > 0
        assert not (weighed & ~segment.sampled_mask).any(), "I3: only sampled tokens have a weight"
        assert not is_all_trained or np.array_equal(weighed, segment.sampled_mask), "I3: all sampled tokens have one"
        if segment.parent is not None:
            shared = t.segments[segment.parent.segment].token_ids[: segment.parent.length]
            assert np.array_equal(segment.token_ids[: len(shared)], shared)
    refs = [ref for turn in t.turns for ref in turn.spans]
    assert len(refs) == len(set(refs)), "a span belongs to one turn"


def check_samples(t: Trajectory) -> None:
    """I2 and I4 on the samples that are made of a trajectory; one that failed has none."""
    samples = to_samples(TrajectoryGroup(id="g", task=t.task, trajectories=(t,)), temperature=1.0)
    for sample in samples:
        arrays = (sample.loss_weights, sample.turn_ids, sample.versions, sample.rollout_logprobs)
        assert {len(array) for array in arrays if array is not None} == {len(sample.token_ids)}, "I2"
    owned = sum(int(np.count_nonzero(sample.versions >= 0)) for sample in samples)
    assert owned == (0 if t.is_failed else t.num_sampled_tokens), "I4: each sampled token is in one sample"


def _key(prompt: Ids, ids: Ids, logprobs: np.ndarray | None) -> tuple[bytes, ...]:
    assert logprobs is not None
    return (
        np.asarray(prompt, np.int32).tobytes(),
        np.asarray(ids, np.int32).tobytes(),
        np.asarray(logprobs, np.float32).tobytes(),
    )
