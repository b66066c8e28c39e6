"""GRPO's advantages against hand-computed examples, and the assignment to samples."""

import math

import numpy as np
import pytest
import torch

from polyturn.algorithms.advantages import advantages, assign_advantages, dr_grpo, grpo, grpo_passk, opo, rloo
from polyturn.core.errors import AlignmentError, TrainingError, UnknownNameError
from polyturn.core.lifecycle import StopReason
from polyturn.core.reward import Reward
from polyturn.core.sample import SampleId, TrainSample
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory, TrajectoryGroup

TASK = Task(id="t", prompt=())


def sample(trajectory: str = "0", segment: int = 0, weights: tuple[float, ...] = (0, 1, 1)) -> TrainSample:
    n = len(weights)
    return TrainSample(
        id=SampleId("g", trajectory, segment),
        token_ids=np.arange(n),
        loss_weights=np.array(weights, np.float32),
        turn_ids=np.zeros(n, np.int32),
    )


def trajectory(id: str, reward: float | None, stop: StopReason = StopReason.STOP) -> Trajectory:
    made = None if reward is None else Reward(total=reward)
    return Trajectory(id=id, task=TASK, segments=(), turns=(), stop_reason=stop, reward=made)


def scalars(found: list[list[np.ndarray]]) -> list[float]:
    return [float(arrays[0][-1]) for arrays in found]


def test_grpo_is_the_z_score_of_the_group_with_the_unbiased_deviation():
    """Shao et al. 2024, 4.1.2. Rewards 1 0 0 1: mean 1/2, std sqrt(4 * 1/4 / 3), so +-sqrt(3)/2."""
    found = grpo(np.array([1.0, 0, 0, 1]), [[sample()] for _ in range(4)])
    assert scalars(found) == pytest.approx(
        [math.sqrt(3) / 2, -math.sqrt(3) / 2, -math.sqrt(3) / 2, math.sqrt(3) / 2], rel=1e-5
    )


def test_dr_grpo_only_centres():
    rewards = np.array([1.0, 0, 0, 0])
    assert scalars(dr_grpo(rewards, [[sample()]] * 4)) == [0.75, -0.25, -0.25, -0.25]
    assert scalars(grpo(rewards, [[sample()]] * 4, norm_by_std=False)) == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("reward", [0.0, 1.0, -0.7, 1e6])
def test_a_group_of_one_has_nothing_to_be_compared_with(reward: float):
    for estimator in (grpo, dr_grpo, rloo, opo, grpo_passk):
        assert scalars(estimator(np.array([reward]), [[sample()]])) == [0], estimator.__name__


def test_equal_rewards_give_no_advantage():
    assert scalars(grpo(np.array([0.3, 0.3, 0.3]), [[sample()]] * 3)) == [0, 0, 0]


def test_only_weighted_tokens_get_the_advantage_on_every_segment():
    found = grpo(
        np.array([1.0, 0.0]), [[sample(weights=(0, 1, 0, 0.5)), sample(segment=1)], [sample("1")]], norm_by_std=False
    )
    assert found[0][0].tolist() == [0, 0.5, 0, 0.5]
    assert found[0][1].tolist() == [0, 0.5, 0.5]


def test_assignment_keeps_order_leaves_failures_out_and_counts_trajectories_without_samples():
    group = TrajectoryGroup(
        id="g",
        task=TASK,
        trajectories=(
            trajectory("0", 1.0),
            trajectory("1", 0.0),
            trajectory("2", 100.0, StopReason.ERROR),
            trajectory("3", 0.5, StopReason.CONTEXT_FULL),
        ),
    )
    samples = [sample("1"), sample("0", 0), sample("0", 1)]
    found = assign_advantages([group], samples, estimator=dr_grpo)
    assert [s.id for s in found] == [s.id for s in samples]
    assert [float(s.advantages[-1]) for s in found] == [-0.5, 0.5, 0.5]


def test_a_sample_without_its_trajectory_is_refused():
    group = TrajectoryGroup(id="g", task=TASK, trajectories=(trajectory("0", 1.0, StopReason.ERROR),))
    with pytest.raises(AlignmentError, match=r"trajectory='0'.*filter samples and groups together"):
        assign_advantages([group], [sample("0")], estimator=grpo)


@pytest.mark.parametrize("reward", [None, float("nan")])
def test_a_reward_that_is_no_number_is_refused(reward):
    group = TrajectoryGroup(id="g", task=TASK, trajectories=(trajectory("0", reward),))
    with pytest.raises(AlignmentError, match="needs a finite one"):
        assign_advantages([group], [sample("0")], estimator=grpo)


def test_estimators_are_found_by_name():
    assert advantages.resolve("grpo") is grpo
    with pytest.raises(UnknownNameError, match="Did you mean 'grpo'"):
        advantages.resolve("grpoo")


@pytest.mark.parametrize(
    "returned",
    [
        None,
        1.0,
        [0.0, 0.0],
        [np.zeros(3)] * 2,
        [[np.zeros(3)]],
        [[np.zeros(2)]] * 2,
        [[0.0]] * 2,
        [],
        [[["x"] * 3]] * 2,
        [[np.zeros((3, 1))]] * 2,
        [[torch.zeros(3, requires_grad=True)]] * 2,
    ],
    ids=range(11),
)
def test_an_estimator_that_returns_something_else_is_told_what_it_should(returned: object):
    group = TrajectoryGroup(id="g", task=TASK, trajectories=(trajectory("0", 1.0), trajectory("1", 0.0)))
    with pytest.raises(TrainingError, match="an array for each of its samples"):
        assign_advantages([group], [sample("0"), sample("1")], estimator=lambda rewards_G, samples_G: returned)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_an_estimator_that_returns_no_finite_number_is_told_where(value: float):
    group = TrajectoryGroup(id="g", task=TASK, trajectories=(trajectory("0", 1.0), trajectory("1", 0.0)))
    given = [[np.zeros(3)], [np.array([0.0, 0.0, value])]]
    with pytest.raises(TrainingError, match=r"returned advantages with (nan|inf) at token 2 of SampleId\(.*trajectory='1'"):
        assign_advantages([group], [sample("0"), sample("1")], estimator=lambda rewards_G, samples_G: given)


def test_an_estimator_that_raises_is_a_sentence_with_its_line():
    group = TrajectoryGroup(id="g", task=TASK, trajectories=(trajectory("0", 1.0), trajectory("1", 0.0)))
    said = r"the advantage estimator raised ZeroDivisionError: division by zero \(test_advantages.py, line \d+\)"
    with pytest.raises(TrainingError, match=said):
        assign_advantages([group], [sample("0"), sample("1")], estimator=lambda rewards_G, samples_G: 1 / 0)
