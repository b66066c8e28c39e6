"""The reward of an episode in an environment: the environment's own rewards, which are the turns' scores "env".

    turns of one player       0.0, 0.0, 1.0                          ->  1.0 (their sum, or the last one)
    turns of two players      seat 0: 0.0, 1.0    seat 1: -1.0
                              ->  {"score": 0.0, "agents": {"seat 0": 1.0, "seat 1": -1.0}}

Each player of a game has a separate reward, so that the loser is not trained with the winner's reward. The score of the
episode is the mean over the players.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from polyturn.core.trajectory import Trajectory


def compute_score(trajectory: Trajectory) -> float | Mapping[str, Any]:
    """Return the sum of an episode's rewards, or the last one if the task's row has {"env": {"score": "last"}}.

    If several agents got rewards, return the mean over the agents as "score", and each agent's value under "agents".
    """
    row_env = trajectory.task.extra.get("env")
    takes_last = isinstance(row_env, Mapping) and row_env.get("score") == "last"
    earned: dict[str, list[float]] = {}
    for turn in trajectory.turns:
        if "env" in turn.scores:
            earned.setdefault(trajectory.agent_of(turn), []).append(turn.scores["env"])
    worth = {agent: scores[-1] if takes_last else math.fsum(scores) for agent, scores in earned.items()}
    if len(worth) < 2:
        return math.fsum(worth.values())
    return {"score": math.fsum(worth.values()) / len(worth), "agents": worth}
