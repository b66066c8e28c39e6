"""Records of a step: advantages and logprobs of sampled tokens, and why a trajectory was dropped."""

from __future__ import annotations

import numpy as np
from test_loop import NotingPolicy

from polyturn.algorithms.advantages import grpo
from polyturn.algorithms.options import AlgorithmOptions, Bounds, CorrectionSettings
from polyturn.core.lifecycle import StopReason
from polyturn.core.reward import Reward
from polyturn.core.task import Task
from polyturn.core.trajectory import Segment, Span, SpanSource, Trajectory, TrajectoryGroup
from polyturn.training.options import TrainOptions
from polyturn.training.update import Update, UpdateSettings

TASK = Task(id="t", prompt=())


class Scoring(NotingPolicy):
    """Returns the log-probability -2 for every token."""

    def forward_backward(self, samples):
        logprobs, entropies = ([np.full(len(s), value, np.float32) for s in samples] for value in (-2.0, 0.5))
        return super().forward_backward(samples)._replace(logprobs=logprobs, entropies=entropies)


def trajectory(
    id: str,
    reward: float | None,
    *,
    weights: list[float] | None = None,
    engine: float = -1.0,
    stop: StopReason = StopReason.ENV_DONE,
) -> Trajectory:
    spans = (
        Span(ids=np.array([1, 2]), source=SpanSource.PROMPT),
        Span(ids=np.array([3, 4]), source=SpanSource.SAMPLED, turn=0, logprobs=np.array([engine, -1.5]), policy_version=0,
             weights=None if weights is None else np.array(weights)),
        Span(ids=np.array([5]), source=SpanSource.OBSERVATION, turn=0),
    )  # fmt: skip
    return Trajectory(
        id=id,
        task=TASK,
        segments=(Segment(spans=spans),),
        turns=(),
        stop_reason=stop if reward is not None else StopReason.ERROR,
        reward=None if reward is None else Reward(total=reward),
        error=None if reward is not None else "boom",
    )


def records(*groups: TrajectoryGroup, **settings: object):
    update = Update(Scoring([]), estimator=grpo, settings=UpdateSettings(**settings))  # type: ignore[arg-type]
    return update.run(groups, step=0).trained


def group(id: str, *members: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(id=id, task=TASK, trajectories=members)


def test_trained_trajectory_keeps_advantages_and_logprobs():
    found = records(group("g0", trajectory("g0/0", 1.0), trajectory("g0/1", 0.0)), train=TrainOptions(minibatches=2))
    for id, sign in (("g0/0", 1), ("g0/1", -1)):
        assert found[id].dropped is None and found[id].weights is None
        assert np.sign(found[id].advantages).tolist() == [sign, sign]
        assert found[id].policy_logprobs.tolist() == [-2.0, -2.0]
        assert found[id].entropies.tolist() == [0.5, 0.5]


def test_dropped_trajectory_says_why():
    found = records(
        group("g0", trajectory("g0/0", 1.0), trajectory("g0/1", 1.0)),
        group("g1", trajectory("g1/0", 1.0), trajectory("g1/1", 0.0), trajectory("g1/2", None)),
        group("g2", trajectory("g2/0", 1.0, weights=[0, 0]), trajectory("g2/1", 0.0)),
    )
    assert {id: one.dropped for id, one in found.items() if one.dropped} == {
        "g0/0": "zero_variance",
        "g0/1": "zero_variance",
        "g1/2": "failed",
        "g2/0": "none of its tokens has a weight",
    }


def test_truncated_trajectories_are_dropped_if_asked():
    cut, other = trajectory("g0/0", 1.0, stop=StopReason.MAX_TOKENS), trajectory("g0/1", 0.0)
    options = (AlgorithmOptions(drop_truncated=flag) for flag in (False, True))
    kept, dropped = (records(group("g0", cut, other), algorithm=algorithm) for algorithm in options)
    assert kept["g0/0"].dropped is None and dropped["g0/0"].dropped == "truncated"
    assert dropped["g0/1"].advantages.tolist() == kept["g0/1"].advantages.tolist()


def test_rejected_trajectory_says_so():
    groups = [group("g0", trajectory("g0/0", 1.0, engine=-9.0), trajectory("g0/1", 0.0))]
    found = records(*groups, correction=CorrectionSettings(reject={"seq_mean_k1": Bounds(0.1, 9.0)}))
    assert found["g0/0"].dropped == "rejected" and found["g0/1"].dropped is None


def test_changed_loss_weights_are_recorded():
    class FirstOnly:
        def weights(self, trajectory: Trajectory, segment: Segment) -> np.ndarray:
            weights = segment.loss_weights.copy()
            weights[3] = 0.0
            return weights

    found = records(group("g0", trajectory("g0/0", 1.0), trajectory("g0/1", 0.0)), loss_scale=FirstOnly())
    assert found["g0/0"].weights.tolist() == [1.0, 0.0]
    assert found["g0/0"].advantages[1] == 0.0
