"""Segments become samples, with every sampled token in exactly one of them (I4)."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polyturn.batching.samples import to_samples
from polyturn.core.builder import TrajectoryBuilder
from polyturn.core.generation import Completion, FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.reward import Reward
from polyturn.core.sample import SampleId
from polyturn.core.task import Task
from polyturn.core.trajectory import Segment, Trajectory, TrajectoryGroup

TASK = Task(id="t", prompt=())


def completion(ids: list[int], logprobs: bool = True) -> Completion:
    return Completion(
        token_ids=ids,
        logprobs=-np.ones(len(ids), np.float32) if logprobs else None,
        finish_reason=FinishReason.STOP,
        policy_versions=((0, 3),),
    )


def group(*segments: tuple[Segment, ...], stop: StopReason = StopReason.STOP) -> TrajectoryGroup:
    made = tuple(
        Trajectory(id=str(i), task=TASK, segments=s, turns=(), stop_reason=stop, reward=Reward(total=0.5))
        for i, s in enumerate(segments)
    )
    return TrajectoryGroup(id="g", task=TASK, trajectories=made)


def test_each_segment_with_a_completion_is_a_sample() -> None:
    builder = TrajectoryBuilder()
    builder.open([1, 2])
    builder.sample(completion([3, 4]), turn=0)
    builder.observe([5], turn=0)
    builder.set_prompt([1, 9, 9], turn=1)
    builder.sample(completion([6]), turn=1)
    builder.open([7, 7])  # the next prompt, and no completion any more
    found = to_samples(group(builder.build()), temperature=0.7)
    assert [s.id for s in found] == [SampleId("g", "0", 0), SampleId("g", "0", 1)]
    first, second = found
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert first.loss_weights.tolist() == [0, 0, 1, 1, 0]
    assert first.turn_ids.tolist() == [-1, -1, 0, 0, 0]
    assert first.rollout_logprobs.tolist() == [0, 0, -1, -1, 0]
    assert first.versions.tolist() == [-1, -1, 3, 3, -1]
    assert (first.reward, first.temperature) == (0.5, 0.7)
    assert second.loss_weights.tolist() == [0, 0, 0, 1]


def test_observations_are_marked_once_and_prompts_never() -> None:
    builder = TrajectoryBuilder()
    builder.open([1, 2])
    builder.sample(completion([3]), turn=0)
    builder.observe([4, 5], turn=0)
    builder.set_prompt([1, 4, 5, 9], turn=1)  # a later segment replays the observation as its prompt
    builder.sample(completion([6]), turn=1)
    builder.observe([7], turn=1)
    first, second = to_samples(group(builder.build()), temperature=1.0, observed=True)
    assert first.observed.tolist() == [0, 0, 0, 1, 1]
    assert second.observed.tolist() == [0, 0, 0, 0, 0, 1]
    assert all(s.observed is None for s in to_samples(group(builder.build()), temperature=1.0))


def test_masked_completion_is_a_sample() -> None:
    builder = TrajectoryBuilder()
    builder.open([1])
    builder.sample(completion([2, 3], logprobs=False), turn=0, weights=[0, 0])
    (found,) = to_samples(group(builder.build()), temperature=0.0)
    assert found.num_weighted == 0
    assert found.rollout_logprobs is None
    assert found.temperature == 1.0


def test_failed_trajectory_has_no_samples() -> None:
    builder = TrajectoryBuilder()
    builder.open([1])
    builder.sample(completion([2]), turn=0)
    assert to_samples(group(builder.build(), stop=StopReason.ERROR), temperature=1.0) == []


@given(moves=st.lists(st.tuples(st.sampled_from(["sample", "observe", "edit"]), st.integers(1, 4)), max_size=12))
def test_every_sampled_token_is_in_exactly_one_sample(moves):
    """I4. Ids are all different here, so a token can be followed wherever it goes."""
    builder, fresh, sampled = TrajectoryBuilder(), iter(range(1000)), []
    builder.open([next(fresh)])
    for turn, (move, size) in enumerate(moves):
        ids = [next(fresh) for _ in range(size)]
        if move == "sample":
            builder.sample(completion(ids), turn=turn)
            sampled += ids
        elif move == "observe":
            builder.observe(ids, turn=turn)
        else:
            builder.set_prompt([*builder.context[:-1], *ids], turn=turn)
    samples = to_samples(group(builder.build()), temperature=1.0)
    trained = [int(i) for s in samples for i in s.token_ids[s.loss_weights > 0]]
    assert sorted(trained) == sampled
