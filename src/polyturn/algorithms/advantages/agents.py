"""Splits groups of trajectories in which agents have separate rewards: estimators get one group for each agent.

    group of 4 games, seat 0 against seat 1  ->  a group of 4 members for seat 0, a group of 4 members for seat 1

A player is compared only with the players of the same seat. So a seat from which it is easy to win does not raise its
player's advantage, and the rewards of the two players of a zero-sum game do not average to 0. A member of such a group has
only the samples and turns of its agent. Source: Liu et al. 2025 (SPIRAL, role-conditioned advantage estimation); SPIRAL
compares with a running mean, as the estimator `rae` does, and this module with the other members of the task's group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from polyturn.core.sample import TrainSample
from polyturn.core.trajectory import Trajectory, Turn


class Share(NamedTuple):
    """The part of a trajectory that belongs to one agent."""

    trajectory: Trajectory
    agent: str | None
    """The agent; None for the whole trajectory."""
    indices: list[int]
    """Indices of its samples among the samples of the step."""

    @property
    def reward(self) -> float:
        """The agent's reward, or the trajectory's if `agent` is None."""
        assert self.trajectory.reward is not None
        return self.trajectory.reward.total if self.agent is None else self.trajectory.reward.of(self.agent)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The agent's turns, in order."""
        if not self._is_apart:
            return self.trajectory.turns
        return tuple(t for t in self.trajectory.turns if self.trajectory.agent_of(t) == self.agent)

    def numbered(self, sample: TrainSample) -> TrainSample:
        """Return the sample with `turn_ids` and `turn_scores` renumbered so that only the agent's turns count."""
        if not self._is_apart:
            return sample
        own = [t.index for t in self.turns]
        number = np.full(len(self.trajectory.turns) + 1, -1, np.int32)  # the last entry serves index -1, the prompt
        number[own] = np.arange(len(own))
        scores = None if sample.turn_scores is None else sample.turn_scores[own]
        return sample.replace(turn_ids=number[sample.turn_ids], turn_scores=scores)

    @property
    def _is_apart(self) -> bool:
        return self.trajectory.reward is not None and self.agent in self.trajectory.reward.agents


def shares(
    trajectories: Sequence[Trajectory], indices: Sequence[list[int]], samples: Sequence[TrainSample]
) -> list[list[Share]]:
    """Split a group into one group per agent with a separate reward; without such agents, return the group as a whole.

    Args:
        trajectories: The live trajectories of a group.
        indices: For each trajectory the indices of its samples.
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
