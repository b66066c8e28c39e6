"""Several agents in one trajectory, each with a reward of its own: an estimator sees each of them as a member by itself.

    group of 4 games, seat 0 against seat 1  ->  a group of 4 members for seat 0, a group of 4 members for seat 1

So a player is compared with the players of the same seat. An easy seat gives no advantage by itself, and the two players of
a zero-sum game do not cancel out. A member has its agent's samples and turns. Source: Liu et al. 2025 (SPIRAL,
role-conditioned advantage estimation), with the group of the task instead of the running mean that `rae` has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from polyturn.core.sample import TrainSample
from polyturn.core.trajectory import Trajectory, Turn


class Share(NamedTuple):
    """The part of a trajectory that one agent has."""

    trajectory: Trajectory
    agent: str | None
    """None is the whole trajectory."""
    indices: list[int]
    """Which of the step's samples."""

    @property
    def reward(self) -> float:
        """The agent's reward, summed over its turns."""
        assert self.trajectory.reward is not None
        return self.trajectory.reward.total if self.agent is None else self.trajectory.reward.of(self.agent)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Its turns, in their order."""
        if not self._is_apart:
            return self.trajectory.turns
        return tuple(t for t in self.trajectory.turns if self.trajectory.agent_of(t) == self.agent)

    def numbered(self, sample: TrainSample) -> TrainSample:
        """Return a sample whose `turn_ids` and `turn_scores` count the agent's turns alone."""
        if not self._is_apart:
            return sample
        own = [t.index for t in self.turns]
        number = np.full(len(self.trajectory.turns) + 1, -1, np.int32)  # the last stands for -1, the prompt
        number[own] = np.arange(len(own))
        scores = None if sample.turn_scores is None else sample.turn_scores[own]
        return sample.replace(turn_ids=number[sample.turn_ids], turn_scores=scores)

    @property
    def _is_apart(self) -> bool:
        return self.trajectory.reward is not None and self.agent in self.trajectory.reward.agents


def shares(
    trajectories: Sequence[Trajectory], indices: Sequence[list[int]], samples: Sequence[TrainSample]
) -> list[list[Share]]:
    """Return the groups that an estimator is to see in place of one group: one for each agent that has a reward of its own.

    Args:
        trajectories: Those of a group that did not fail.
        indices: For each of them the indices of its samples.
        samples: All samples of the step.
    """
    named = {a for t in trajectories if t.reward is not None for a in t.reward.agents}
    pairs = list(zip(trajectories, indices, strict=True))
    if not named:
        return [[Share(t, None, at) for t, at in pairs]]
    agents = dict.fromkeys(seg.agent for t in trajectories for seg in t.segments)
    parts = []
    for agent in (*agents, *sorted(named - set(agents))):
        members = [
            Share(t, agent, [i for i in at if t.segments[samples[i].id.segment].agent == agent])
            for t, at in pairs
            if t.reward is not None
        ]
        parts.append([m for m in members if m.indices or agent in m.trajectory.reward.agents])  # type: ignore[union-attr]
    return [group for group in parts if group]
