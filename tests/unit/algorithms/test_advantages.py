"""GRPO's advantages against hand-computed examples, and the assignment to samples."""

import math

import numpy as np
import pytest
import torch

from polyturn.algorithms.advantages import advantages, assign_advantages, dr_grpo, grpo
from polyturn.core.errors import AlignmentError, TrainingError, UnknownNameError
from polyturn.core.lifecycle import StopReason
from polyturn.core.reward import Reward
from polyturn.core.sample import TrainSample
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from support.refusals import refuses
from support.samples import sample_of

TASK = Task(id="t", prompt=())


def sample(trajectory: str = "0", segment: int = 0, weights: tuple[float, ...] = (0, 1, 1)) -> TrainSample:
    n = len(weights)
    return sample_of(("g", trajectory, segment), np.arange(n), np.array(weights, np.float32))


def trajectory(id: str, reward: float | None, stop: StopReason = StopReason.STOP) -> Trajectory:
    made = None if reward is None else Reward(total=reward)
    return Trajectory(id=id, task=TASK, segments=(), turns=(), stop_reason=stop, reward=made)


def scalars(found: list[list[np.ndarray]]) -> list[float]:
    return [float(arrays[0][-1]) for arrays in found]


def test_grpo_is_the_z_score_with_the_unbiased_deviation():
    """Shao et al. 2024, 4.1.2. Rewards 1 0 0 1: mean 1/2, std sqrt(4 * 1/4 / 3), so +-sqrt(3)/2."""
    found = grpo(np.array([1.0, 0, 0, 1]), [[sample()] for _ in range(4)])
    assert scalars(found) == pytest.approx(
        [math.sqrt(3) / 2, -math.sqrt(3) / 2, -math.sqrt(3) / 2, math.sqrt(3) / 2], rel=1e-5
    )


def test_assignment_keeps_order_and_leaves_failures_out():
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


def test_estimator_is_found_by_name():
    assert advantages.resolve("grpo") is grpo
    refuses(lambda: advantages.resolve("grpoo"), UnknownNameError, "'grpo'")


GROUP = TrajectoryGroup(id="g", task=TASK, trajectories=(trajectory("0", 1.0), trajectory("1", 0.0)))
SAMPLES = [sample("0"), sample("1")]
WRONG = {
    "no list": None,
    "flat": [0.0, 0.0],
    "one trajectory": [[np.zeros(3)]],
    "other lengths": [[np.zeros(2)]] * 2,
    "no numbers": [[["x"] * 3]] * 2,
    "two axes": [[np.zeros((3, 1))]] * 2,
    "with a gradient": [[torch.zeros(3, requires_grad=True)]] * 2,
    "nan": [[np.zeros(3)], [np.array([0.0, 0.0, math.nan])]],
    "beyond float32": [[np.zeros(3)], [np.array([0.0, 0.0, 1e300])]],
}


@pytest.mark.parametrize("returned", WRONG.values(), ids=WRONG.keys())
def test_estimator_with_a_wrong_result_is_refused(returned: object):
    with pytest.raises(
        TrainingError, match=r"(array|token 2 of SampleId\(.*trajectory='1').*\(test_advantages.py, line \d+\)"
    ):
        assign_advantages([GROUP], SAMPLES, estimator=lambda rewards_G, samples_G: returned)


def test_estimator_that_raises_is_named_with_its_line():
    with pytest.raises(TrainingError, match=r"ZeroDivisionError: .*\(test_advantages.py, line \d+\)"):
        assign_advantages([GROUP], SAMPLES, estimator=lambda rewards_G, samples_G: 1 / 0)


def test_trajectory_without_a_reward_may_have_advantage_0():
    group = TrajectoryGroup(
        id="g", task=TASK, trajectories=(trajectory("0", None), *GROUP.trajectories[1:], trajectory("2", 1.0))
    )
    found = assign_advantages([group], [sample("0"), sample("1"), sample("2")], estimator=dr_grpo, needs_rewards=False)
    assert [float(s.advantages[-1]) for s in found] == [0.0, -0.5, 0.5]


@pytest.mark.parametrize(("reward", "stop"), [(None, StopReason.STOP), (math.nan, StopReason.STOP), (1.0, StopReason.ERROR)])
def test_sample_without_a_reward_is_refused(reward: float | None, stop: StopReason):
    group = TrajectoryGroup(id="g", task=TASK, trajectories=(trajectory("0", reward, stop),))
    refuses(lambda: assign_advantages([group], [sample("0")], estimator=grpo), AlignmentError, "0")
