"""Data to prepare a tiny model for Nim against itself: texts, games of beginners, and an opponent for evaluation.

    pile 0: 3   pile 1: 4        [1 2]   takes two from pile 1; the player who takes the last one wins

A player who leaves both piles equal wins. Most beginners make a random legal move, and a few know this. The policy is
evaluated against `random_move`, because the success rate in self-play means nothing: one of the two always wins.
"""

from __future__ import annotations

import functools
import random
import re
from typing import Any

from polyturn.core.messages import Message
from polyturn.data.conversations import Conversation
from polyturn.environments import Adapter, find_adapter

PILES = [3, 4]
_PILE = re.compile(r"pile (\d): (\d)")


@functools.cache
def adapter() -> Adapter:
    """Return the adapter that creates the game."""
    return find_adapter("textarena:Nim-v0", {"piles": PILES})


def legal_moves(observation: str) -> list[str]:
    """Return all legal moves in the last position of an observation."""
    position = _PILE.findall(observation)[-len(PILES) :]
    return [f"[{pile} {n}]" for pile, left in position for n in range(1, int(left) + 1)]


class random_move:  # noqa: N801 - a config names it like a function
    """A player who makes a random legal move; one object plays one game."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, observation: str) -> str:
        return self._random.choice(legal_moves(observation))


def demonstrations(seed: int, num_conversations: int, knowing: float = 0.2) -> list[Conversation]:
    """Return games of two beginners, each from one player's view; a share `knowing` of players leave the piles equal."""
    rng = random.Random(f"games-{seed}")
    games: list[Conversation] = []
    while len(games) < num_conversations:
        games += _game(rng, [rng.random() < knowing for _ in range(2)])
    return games[:num_conversations]


def _game(rng: random.Random, knows: list[bool]) -> list[Conversation]:
    game: Any = adapter().make()
    seen: dict[int, list[Message]] = {0: [], 1: []}
    position = game.reset(seed=0)
    while not position.terminated:
        moves = legal_moves(position.observation)
        left = [int(n) for _, n in _PILE.findall(position.observation)[-len(PILES) :]]
        best = f"[{left.index(max(left))} {max(left) - min(left)}]"
        move = best if knows[position.seat] and best in moves else rng.choice(moves)
        seen[position.seat] += [Message(role="user", content=position.observation), Message(role="assistant", content=move)]
        position = game.step(move)
    return [Conversation(messages=tuple(messages)) for messages in seen.values() if messages]


def corpus() -> list[str]:
    """Return the texts to train the tokenizer on."""
    return [m.text for c in demonstrations(0, 400) for m in c.messages]
