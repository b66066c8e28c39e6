"""A trajectory that becomes several samples stays one trajectory: one reward, its own scores, metrics per trajectory.

Episodes whose scheduler rewrites, forks and goes on at random, in groups that finish in any order; whatever comes of it, the
numbers are those of trajectories, and no sample ever carries another trajectory's.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.algorithms.advantages import assign_advantages, grpo
from polyturn.batching.filters import filter_groups
from polyturn.batching.samples import dropped_by_scale, to_samples
from polyturn.core.metrics import reduce
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.rollout.episode import Episode
from polyturn.rollout.limits import Limits
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing.episodes import scripted_context, task
from polyturn.training.rollout_metrics import rollout_metrics


class Wanders(MultiTurnScheduler):
    """Goes on, rewrites, forks, fails or ends, as the episode's own dice fall."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    async def step(self, episode: Episode, turn: OpenTurn) -> Any:
        dice = random.Random(f"{self.seed}-{episode.id}-{turn.index}")
        await asyncio.sleep(dice.choice([0, 0, 0.001]))
        if dice.random() < 0.4:
            turn.scores["luck"] = dice.random()
        match dice.randrange(6):
            case 0:
                return None
            case 1:
                return episode.go_on(" and", keep=0)
            case 2:
                episode.rewrite([*episode.task.prompt, {"role": "user", "content": f"Anew {turn.index}."}])
                return "Go."
            case 3 if "#" not in episode.id:
                fork = episode.fork(messages=[*episode.messages, {"role": "user", "content": "Meanwhile?"}])
                await self.run_forks([fork])
                return "And?"
            case 4 if dice.random() < 0.3:
                raise RuntimeError("bad luck")
            case _:
                return "More."


def play(seed: int, count: int, size: int) -> list[TrajectoryGroup]:
    rewards = {"luck": lambda trajectory: float(len(trajectory.turns) % 3)}
    context = scripted_context(["one", "two", "three"], scheduler=Wanders(seed), rewards=rewards, limits=Limits(max_turns=4))

    async def run() -> list[TrajectoryGroup]:
        pool = RolloutPool(context, max_concurrent=3, max_failed_share=1.0)
        specs = [GroupSpec(id=f"g{i}", task=task(id="same", data_source="luck"), size=size) for i in range(count)]
        return await asyncio.gather(*(pool.run_one(spec) for spec in specs))

    return asyncio.run(run())


@given(seed=st.integers(0, 10**6), count=st.integers(1, 3), size=st.integers(2, 4))
def test_trajectories_keep_their_reward_and_scores(seed: int, count: int, size: int) -> None:
    groups = play(seed, count, size)
    everyone = [t for g in groups for t in g.trajectories]
    live = [t for t in everyone if not t.is_failed]
    # Metrics are means over trajectories, however many samples and turns each has.
    metrics = reduce(rollout_metrics(groups, version=0))
    assert metrics["rollout/failed"] == pytest.approx(np.mean([t.is_failed for t in everyone]))
    assert metrics["rollout/turns"] == pytest.approx(np.mean([len(t.turns) for t in everyone]))
    assert metrics["rollout/segments"] == pytest.approx(np.mean([len(t.segments) for t in everyone]))
    if live:
        assert metrics["reward/mean"] == pytest.approx(np.mean([t.reward.total for t in live if t.reward]))
    # Groups are those of the row, though all rows have one text.
    assert [[t.id for t in g.trajectories] for g in groups] == [[f"{g.id}/{m}" for m in range(size)] for g in groups]
    # Samples, in any order, carry what is their own trajectory's.
    kept = filter_groups(groups, zero_variance=False).groups
    samples = [s for g in kept for s in to_samples(g, temperature=1.0)]
    assert reduce(dropped_by_scale(kept, samples))["tokens/dropped_loss_scale"] == 0
    random.Random(seed).shuffle(samples)
    samples = assign_advantages(kept, samples, estimator=grpo)
    by_id = {(g.id, t.id): (g, t) for g in kept for t in g.trajectories}
    for s in samples:
        group, t = by_id[s.id.group, s.id.trajectory]
        assert s.reward == t.reward.total
        expected = [np.nan if score is None else score for score in t.turn_scores]
        assert (s.turn_scores is None) == bool(np.isnan(expected).all())
        if s.turn_scores is not None:
            assert np.array_equal(s.turn_scores, np.float32(expected), equal_nan=True)
        rewards = [m.reward.total for m in group.trajectories if m.reward is not None]
        # A trajectory whose siblings all failed teaches nothing.
        advantage = (s.reward - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-6) if len(rewards) > 1 else 0.0
        assert s.advantages[s.loss_weights != 0] == pytest.approx(np.full(s.num_weighted, advantage), abs=1e-5)
    # Every sampled token that was not cut away is trained once.
    assert sum(s.num_weighted for s in samples) == sum(t.num_sampled_tokens for t in live)
