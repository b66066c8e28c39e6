"""Scripted episodes of environments of other packages, and each package's rewards for the same seed and actions.

    case.recorded()   the package alone: created, reset with the seed, stepped by a random player; its actions and rewards
    case.played()     an episode of polyturn, in which the model writes the same actions; the reward of each player

Both must be equal. The reference uses only polyturn's parser of offered moves; the rest is written from each
package's own documentation.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from polyturn.environments import find_adapter
from polyturn.environments.players import moves_in
from polyturn.environments.scripted import Played, play


class Recorded(NamedTuple):
    """The actions and rewards of a package alone."""

    actions: list[str]
    rewards: dict[str, float]
    """Seat -> reward; a single-player game has "seat 0"."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One environment, one seed."""

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 7
    moves: tuple[str, ...] = ()
    """The moves of a game that does not list them."""
    max_actions: int = 60

    @property
    def package(self) -> str:
        """The package of the environment."""
        return self.name.partition(":")[0]

    def recorded(self) -> Recorded:
        """Play an episode with the package alone."""
        return {"gymnasium": _gymnasium, "textarena": _textarena, "reasoning_gym": _reasoning_gym}[self.package](self)

    def actions(self) -> list[str]:
        """Return the texts that the model must write."""
        return self.recorded().actions

    def own_reward(self) -> float | dict[str, float]:
        """Return the reward of the package: a number, or one for each agent of a game."""
        rewards = self.recorded().rewards
        return rewards.get("seat 0", 0.0) if set(rewards) <= {"seat 0"} else rewards

    async def played(self, actions: list[str]) -> Played:
        """Run an episode."""
        return await play(find_adapter(self.name, self.kwargs), seed=self.seed, actions=actions)


def _gymnasium(case: Case) -> Recorded:
    import gymnasium
    import numpy as np

    env = gymnasium.make(case.name.partition(":")[2], **case.kwargs)
    env.reset(seed=case.seed)
    env.action_space.seed(case.seed)
    actions, total = [], 0.0
    for _ in range(case.max_actions):
        action = env.action_space.sample()
        if isinstance(action, np.ndarray):
            numbers = [f"{n:.3f}" for n in action.flatten()]
            action = np.array([float(n) for n in numbers], dtype=action.dtype).reshape(action.shape)
            actions.append(f"<action>{' '.join(numbers)}</action>")
        else:
            actions.append(f"I choose <action>{action}</action>.")
        _, reward, terminated, truncated, _ = env.step(action)
        total += float(reward)
        if terminated or truncated:
            break
    env.close()
    return Recorded(actions, {"seat 0": total})


def _textarena(case: Case) -> Recorded:
    import textarena

    chance, outside = random.Random(case.seed), random.getstate()
    with contextlib.redirect_stdout(io.StringIO()):
        game = textarena.make(case.name.partition(":")[2])
        num_players = case.kwargs.get("num_players") or find_adapter(case.name, case.kwargs).num_seats
        random.seed(case.seed)
        game.reset(num_players=num_players, seed=case.seed)
    actions: list[str] = []
    offered = ["[0]"]
    for _ in range(case.max_actions):
        _, observation = game.get_observation()
        offered = list(case.moves) or moves_in(str(observation)) or offered
        actions.append(chance.choice(offered))
        is_done, _ = game.step(action=actions[-1])
        if is_done:
            break
    rewards, _ = game.close()
    random.setstate(outside)
    return Recorded(actions, {f"seat {seat}": float(reward) for seat, reward in (rewards or {}).items()})


def _reasoning_gym(case: Case) -> Recorded:
    import reasoning_gym

    random.seed(case.seed)
    dataset = reasoning_gym.create_dataset(
        case.name.partition(":")[2], seed=case.seed, size=1, **{k: v for k, v in case.kwargs.items() if k != "tries"}
    )
    entry = dataset[0]
    answers = ["42", str(entry["answer"])][-int(case.kwargs.get("tries", 1)) :]
    score = float(dataset.score_answer(answer=answers[-1], entry=entry))
    return Recorded([f"Let me see. <answer>{answer}</answer>" for answer in answers], {"seat 0": score})


def _games(*names: str, **fields: Any) -> list[Case]:
    return [Case(name=f"textarena:{name}", **fields) for name in names]


CASES: list[Case] = [
    *(
        Case(name=f"gymnasium:{id}", max_actions=40)
        for id in (
            *("FrozenLake-v1", "FrozenLake8x8-v1", "CliffWalking-v1", "Taxi-v4", "Blackjack-v1"),
            *("CartPole-v1", "MountainCar-v0", "Acrobot-v1", "Pendulum-v1", "MountainCarContinuous-v0"),
        )
    ),
    *_games("GuessTheNumber-v0", moves=tuple(f"[{n}]" for n in range(1, 21))),
    *_games("TicTacToe-v0", "WildTicTacToe-v0", "ThreePlayerTicTacToe-v0", "KuhnPoker-v0", "SimpleTak-v0", "Othello-v0"),
    *_games("ConnectFour-v0", moves=tuple(f"[col {n}]" for n in range(7))),
    *_games("Nim-v0", moves=tuple(f"[{pile} {n}]" for pile in range(3) for n in (1, 2))),
    *_games("Mastermind-v0", moves=("[1 2 3 4]", "[2 3 4 5]", "[6 1 2 3]", "[5 4 3 1]")),
    *_games("LightsOut-v0", moves=tuple(f"[{r}, {c}]" for r in range(5) for c in range(5))),
    *_games("FrozenLake-v0", moves=("[up]", "[down]", "[left]", "[right]")),
    *_games("2048-v0", moves=("[up]", "[down]", "[left]", "[right]"), max_actions=400),
    *_games("PigDice-v0", moves=("[roll]", "[hold]"), max_actions=200),
    *_games("IteratedPrisonersDilemma-v0", moves=("[cooperate]", "[defect]")),
    *_games("IteratedRockPaperScissors-v0", moves=("[rock]", "[paper]", "[scissors]")),
    *(
        Case(name=f"reasoning_gym:{name}", kwargs={"tries": 2} if name == "chain_sum" else {})
        for name in ("chain_sum", "leg_counting", "gcd", "spell_backward", "base_conversion", "letter_counting")
    ),
]
