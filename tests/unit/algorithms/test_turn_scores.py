"""A score of a turn, from a hook to the gradient: turn.scores, the record, the sample, a custom estimator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polyturn.algorithms.advantages import advantages, assign_advantages
from polyturn.batching.samples import to_samples
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.rewards.router import RewardRouter
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler, Reply
from polyturn.testing.episodes import scripted_context, task
from support.example_schedulers import Tree, of_example


@advantages.register("test_return_to_go")
def return_to_go(rewards_G: Any, samples_G: Any) -> list[list[Any]]:
    """Give each turn the sum of the scores from it on, less the group's mean return."""
    totals = [np.nansum(samples[0].turn_scores) for samples in samples_G if samples]
    baseline = float(np.mean(totals))

    def one(sample: Any) -> Any:
        to_go = np.nancumsum(sample.turn_scores[::-1])[::-1]
        return np.where(sample.loss_weights != 0, to_go[sample.turn_ids] - baseline, 0.0)

    return [[one(s) for s in samples] for samples in samples_G]


class Scores(MultiTurnScheduler):
    """Scores the first turn in a hook and the third in a step; the second has no score."""

    scores_turns = True

    async def on_turn_end(self, episode: Any, turn: Any) -> None:
        if turn.index == 0:
            turn.scores["care"] = 0.25

    async def step(self, episode: Any, turn: Any) -> Reply:
        if turn.index == 2:
            return Reply(is_done=True, scores={"goal": 1.0})
        if turn.index == 1:
            episode.rewrite([*episode.task.prompt, {"role": "user", "content": "Anew."}])  # another segment
        return Reply.of("go on")


async def play(scheduler: Any, says: Any = ("a", "b", "c"), **options: Any) -> Trajectory:
    context = scripted_context(list(says) if isinstance(says, tuple) else says, scheduler=scheduler, **options)
    context.rewarder = RewardRouter(
        {"tree": of_example("tree.py:score_tree")}, scheduler=SimpleNamespace(scores_turns=True, gives_reward=False)
    )
    t = await run_episode(
        context, task(data_source="tree" if isinstance(scheduler, Tree) else None, ground_truth="42"), id="e"
    )
    assert not t.is_failed, t.error
    return t


def by_turn(t: Trajectory, estimator: Any) -> dict[int, float]:
    """Return the advantage of each turn's tokens."""
    group = TrajectoryGroup(id="g", task=t.task, trajectories=(t,))
    samples = assign_advantages([group], to_samples(group, temperature=1.0), estimator=estimator)
    found: dict[int, float] = {}
    for s in samples:
        assert s.advantages is not None
        for index in np.flatnonzero(s.loss_weights):
            assert found.setdefault(int(s.turn_ids[index]), float(s.advantages[index])) == float(s.advantages[index])
    return found


async def test_turn_scores_reach_an_estimator_across_segments() -> None:
    t = await play(Scores())
    assert t.turn_scores == (0.25, None, 1.0) and len(t.segments) == 2
    assert t.reward.total == 1.25
    samples = to_samples(TrajectoryGroup(id="g", task=t.task, trajectories=(t,)), temperature=1.0)
    assert all(np.array_equal(s.turn_scores, [0.25, np.nan, 1.0], equal_nan=True) for s in samples)  # type: ignore[arg-type]
    assert by_turn(t, advantages.resolve("test_return_to_go")) == pytest.approx({0: 0.0, 1: -0.25, 2: -0.25})


@pytest.mark.parametrize("score", ["much", float("nan"), None])
async def test_score_that_is_not_a_number_fails_its_trajectory(score: Any) -> None:
    class Odd(MultiTurnScheduler):
        async def on_turn_end(self, episode: Any, turn: Any) -> None:
            turn.scores["care"] = score

    t = await run_episode(scripted_context(["x"], scheduler=Odd()), task(), id="e")
    assert t.error is not None and f"turn 0 has the score care={score!r}; it must be a finite number" in t.error


async def test_shared_chunk_of_a_tree_gets_the_mean_of_its_leaves() -> None:
    """The estimator that the guide shows for trees: each turn against the mean of its group's trees."""

    def say(request: Any) -> str:
        number = int(request.session_id.rpartition("#")[2])
        return r"\boxed{42}" if number in (3, 4) else "wrong, and long enough to be cut"

    t = await play(Tree(width=4), says=say, limits=Limits(max_tokens_per_turn=12, max_turns=2))

    def of_turns(rewards_G: Any, samples_G: Any) -> Any:
        mean = float(np.mean(rewards_G))
        return [[np.where(s.loss_weights != 0, s.turn_scores[s.turn_ids] - mean, 0.0) for s in ss] for ss in samples_G]

    assert t.reward.total == 0.5
    scores = {turn.info["depth"]: [] for turn in t.turns}
    for turn in t.turns:
        scores[turn.info["depth"]].append(turn.scores["tree"])
    assert sorted(scores[0]) == [0.0, 1.0] or sorted(scores[0]) == [0.5, 0.5]
    assert by_turn(t, of_turns) == pytest.approx({turn.index: turn.scores["tree"] - 0.5 for turn in t.turns})
