"""Measures the episodes that each estimator needs in a game with known credit: sixteen turns, each with a score.

    python benchmarks/turn_credit.py [--seeds 20]

Every estimator has its best learning rate; the figure is the median over seeds. Prints one JSON line.

    turn      0        1        …   15           in each turn one of A actions is right, and scores 1 at once
    reward    the sum of the scores              the policy is a table of logits [turn, action], the critic a value a turn

Every turn contributes equally to the reward and is independent of the others. An estimator of outcomes must learn this from
sums; an estimator of turns reads the scores. The trajectories with scored turns, the samples with observations between the
turns and `assign_advantages` are real; only the policy is a table, so that thousands of episodes take a second.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyturn.algorithms.advantages import advantages, assign_advantages, bind_estimator, traits_of
from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.reward import Reward
from polyturn.core.sample import SampleId, TrainSample
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory, TrajectoryGroup, Turn

_TASK = Task(id="game", prompt=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """The size of the game and of a step."""

    turns: int = 16
    actions: int = 8
    groups_per_step: int = 1
    group_size: int = 8
    solved_at: float = 0.9
    """Share of the largest reward at which the game counts as solved."""
    max_steps: int = 400
    critic_lr: float = 0.5


@dataclass(slots=True, kw_only=True)
class Learner:
    """Trains a table of logits and a table of values with the advantages of one estimator."""

    game: Game
    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    lr: float = 4.0
    seed: int = 0

    def episodes_needed(self) -> int:
        """Return the number of episodes until the policy's expected reward is high enough; the maximum if it never is."""
        game, rng = self.game, np.random.default_rng(self.seed)
        estimator = bind_estimator(advantages.resolve(self.name), offered={}, kwargs=self.kwargs)
        right = rng.integers(game.actions, size=game.turns)
        logits = np.zeros((game.turns, game.actions))
        values = np.zeros(game.turns)
        per_step = game.groups_per_step * game.group_size
        for step in range(game.max_steps):
            policy = _softmax(logits)
            if policy[np.arange(game.turns), right].mean() >= game.solved_at:
                return step * per_step
            groups, samples, actions = _play(game, policy, right, values, rng)
            credited = assign_advantages(groups, samples, estimator=estimator)
            gradient = np.zeros_like(logits)
            for sample, taken in zip(credited, actions, strict=True):
                assert sample.advantages is not None
                credit = sample.advantages[sample.loss_weights != 0].astype(np.float64)
                gradient -= credit[:, None] * policy
                gradient[np.arange(game.turns), taken] += credit
            logits += self.lr * gradient / per_step
            if traits_of(estimator).needs_values:
                returns = np.array([s.returns[s.loss_weights != 0] for s in credited if s.returns is not None])
                values += game.critic_lr * (returns.mean(0) - values)
        return game.max_steps * per_step


def _play(
    game: Game, policy: NDArray[np.float64], right: NDArray[np.int64], values: NDArray[np.float64], rng: np.random.Generator
) -> tuple[list[TrajectoryGroup], list[TrainSample], list[NDArray[np.int64]]]:
    groups, samples, actions = [], [], []
    for g in range(game.groups_per_step):
        members = []
        for m in range(game.group_size):
            taken = (policy.cumsum(1) < rng.random((game.turns, 1))).sum(1).clip(max=game.actions - 1)
            scores = (taken == right).astype(float)
            members.append(_trajectory(f"g{g}/{m}", scores))
            samples.append(_sample(f"g{g}", f"g{g}/{m}", taken, values))
            actions.append(taken)
        groups.append(TrajectoryGroup(id=f"g{g}", task=_TASK, trajectories=tuple(members)))
    return groups, samples, actions


def _trajectory(id: str, scores: NDArray[np.float64]) -> Trajectory:
    turns = tuple(
        Turn(
            index=k,
            message=Message(role="assistant", content=""),
            finish_reason=FinishReason.STOP,
            scores={"env": float(score)},
            info={"state_key": k + 1},
        )
        for k, score in enumerate(scores)
    )
    reward = Reward(total=float(scores.sum()))
    return Trajectory(id=id, task=_TASK, segments=(), turns=turns, stop_reason=StopReason.STOP, reward=reward)


def _sample(group: str, trajectory: str, taken: NDArray[np.int64], values: NDArray[np.float64]) -> TrainSample:
    """Return a prompt token, then each turn's action and an observation, where the critic's value is nonsense."""
    num = len(taken)
    return TrainSample(
        id=SampleId(group, trajectory, 0),
        token_ids=np.concatenate([[0], np.stack([taken, np.zeros(num, np.int64)], 1).ravel()]),
        loss_weights=np.concatenate([[0], np.tile([1, 0], num)]),
        turn_ids=np.concatenate([[-1], np.repeat(np.arange(num), 2)]),
        values=np.concatenate([[9], np.stack([values, np.full(num, 9.0)], 1).ravel()]),
    )


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    raised = np.exp(logits - logits.max(1, keepdims=True))
    shares: NDArray[np.float64] = raised / raised.sum(1, keepdims=True)
    return shares


TURN_LEVEL: dict[str, dict[str, Any]] = {
    "return_to_go": {"gamma": 0.5},
    "mt_grpo": {},
    "gigpo": {"gamma": 0.5},
    "turn_gae": {"lam": 0.5},
    "bilevel_gae": {"turn_lam": 0.5},
}
"""Estimators of turns -> their options."""


def best_median(game: Game, name: str, kwargs: dict[str, Any], *, lrs: Sequence[float], seeds: Sequence[int]) -> float:
    """Return the median number of episodes over seeds, at the estimator's best learning rate."""
    return min(
        float(np.median([Learner(game=game, name=name, kwargs=kwargs, lr=lr, seed=s).episodes_needed() for s in seeds]))
        for lr in lrs
    )


LRS = (1.0, 2.0, 4.0, 8.0, 16.0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    seeds = range(parser.parse_args().seeds)
    game = Game()
    wanted = {"grpo": {}, "gae": {"lam": 0.5}, **TURN_LEVEL}
    episodes = {name: best_median(game, name, kwargs, lrs=LRS, seeds=seeds) for name, kwargs in wanted.items()}
    share = {name: round(episodes[name] / episodes["grpo"], 3) for name in TURN_LEVEL}
    result = {
        "benchmark": "turn_credit",
        "turns": game.turns,
        "actions": game.actions,
        "seeds": len(seeds),
        "episodes": episodes,
        "share_of_grpo": share,
        "target": 0.5,
        "ok": max(share.values()) <= 0.5,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
