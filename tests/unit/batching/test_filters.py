"""Filters drop what cannot or must not be trained, and count every dropped token."""

import dataclasses

import numpy as np
import pytest

from polyturn.batching.filters import filter_groups, filter_samples, has_signal
from polyturn.batching.samples import to_samples
from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.metrics import reduce
from polyturn.core.reward import Reward
from polyturn.core.task import Task
from polyturn.core.trajectory import Segment, Span, SpanSource, Trajectory, TrajectoryGroup, Turn

TASK = Task(id="t", prompt=())


def trajectory(
    id: str, reward: float, stop: StopReason = StopReason.STOP, weights: tuple[float, ...] = (1, 1)
) -> Trajectory:
    spans = (
        Span(ids=[1], source=SpanSource.PROMPT),
        Span(ids=[2] * len(weights), source=SpanSource.SAMPLED, turn=0, weights=np.array(weights)),
    )
    failed = stop.is_failure
    return Trajectory(
        id=id,
        task=TASK,
        segments=(Segment(spans=spans),),
        turns=(),
        stop_reason=stop,
        reward=None if failed else Reward(total=reward),
        error="broken" if failed else None,
    )


def group(id: str, *trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(id=id, task=TASK, trajectories=trajectories)


def test_components_of_a_reward_can_be_the_signal() -> None:
    """The product of the scores is 0 for both; an estimator that weighs each score can still compare."""

    def of(id: str, **parts: float) -> Trajectory:
        return dataclasses.replace(
            trajectory(id, 0.0), reward=Reward(total=0.0, components=parts, info={"seconds": len(id)})
        )

    apart = group("g", of("0", right=0.0, polite=1.0), of("01", right=0.0, polite=0.0))
    assert not has_signal(apart)
    assert has_signal(apart, components=("right", "polite")) and not has_signal(apart, components=("right",))
    assert has_signal(apart, components=("seconds",)), "a number that the reward function returned beside its score"


def test_groups_without_a_difference_are_dropped() -> None:
    groups = [
        group("mixed", trajectory("0", 1), trajectory("1", 0)),
        group("same", trajectory("0", 1), trajectory("1", 1)),
        group("failed", trajectory("0", 1, StopReason.ERROR)),
        group("left", trajectory("0", 1), trajectory("1", 0), trajectory("2", 5, StopReason.ABORTED)),
        group("same but for a failure", trajectory("0", 1), trajectory("1", 1), trajectory("2", 0, StopReason.ERROR)),
    ]
    kept, metrics = filter_groups(groups)
    assert [(g.id, len(g.trajectories)) for g in kept] == [("mixed", 2), ("left", 2)]
    assert reduce(metrics) == {
        "buffer/groups": 5,
        "buffer/groups_kept": 2,
        "buffer/groups_all_failed": 1,
        "buffer/groups_one_left": 0,
        "buffer/groups_zero_variance": 2,
        "buffer/failed_trajectories": 3,
        "tokens/dropped_failed": 6,
        "tokens/dropped_one_left": 0,
        "tokens/dropped_zero_variance": 8,
    }


def test_group_with_one_member_left_is_dropped() -> None:
    def lone() -> TrajectoryGroup:
        return group("lone", trajectory("0", 1), trajectory("1", 0, StopReason.ERROR), trajectory("2", 0, StopReason.ERROR))

    groups = [group("mixed", trajectory("0", 1), trajectory("1", 0)), lone()]
    kept, metrics = filter_groups(groups, min_members=2, zero_variance=False)
    counts = reduce(metrics)
    assert [g.id for g in kept] == ["mixed"]
    assert (counts["buffer/groups_one_left"], counts["tokens/dropped_one_left"]) == (1, 2)
    assert [len(g.trajectories) for g in filter_groups(groups, zero_variance=False).groups] == [2, 1]
    assert has_signal(lone()) and not has_signal(lone(), min_members=2)


def test_zero_variance_groups_can_be_kept() -> None:
    groups = [group("same", trajectory("0", 1), trajectory("1", 1)), group("one", trajectory("0", 1))]
    assert [g.id for g in filter_groups(groups).groups] == ["one"]
    assert [g.id for g in filter_groups(groups, zero_variance=False).groups] == ["same", "one"]


@pytest.mark.parametrize(("second", "differs"), [(0.9, True), (0.2, False)])
def test_scores_of_turns_can_be_the_signal(second: float, differs: bool) -> None:
    def scored(id: str, score: float) -> Trajectory:
        message = Message(role="assistant", content="")
        turn = Turn(index=0, message=message, finish_reason=FinishReason.STOP, spans=(), scores={"coach": score})
        return dataclasses.replace(trajectory(id, 1), turns=(turn,))

    one = group("g", scored("0", 0.2), scored("1", second))
    assert not has_signal(one)
    assert has_signal(one, by_turns=True) == differs


def test_dropped_samples_are_counted_by_reason() -> None:
    cut = group("g", trajectory("0", 1), trajectory("1", 0, StopReason.MAX_TOKENS), trajectory("2", 0, weights=(0, 0)))
    samples = to_samples(cut, temperature=1.0)
    kept, metrics = filter_samples(samples, [cut], drop_truncated=True)
    assert [s.id.trajectory for s in kept] == ["0"]
    assert reduce(metrics) == {
        "buffer/samples": 3,
        "buffer/samples_kept": 1,
        "buffer/samples_truncated": 1,
        "buffer/samples_unweighted": 1,
        "tokens/dropped_truncated": 2,
    }
    assert [s.id.trajectory for s in filter_samples(samples, [cut]).samples] == ["0", "1"]
